package safetensors

import (
	"encoding/binary"
	"strings"
)

// An attack is a file that breaks one rule, and what is said of it.
type attack struct {
	name  string
	file  string
	wrong string // the error after its package
}

// one is a header with one tensor "a" of these fields, commas after each.
func one(fields ...string) string {
	return `{"a":{` + strings.Join(fields, ",") + `}}`
}

const (
	dtypeU8  = `"dtype":"U8"`
	shape2   = `"shape":[2]`
	offsets2 = `"data_offsets":[0,2]`
)

// raw is a file with any length before its header.
func raw(length uint64, rest string) string {
	return string(binary.LittleEndian.AppendUint64(nil, length)) + rest
}

// attacks are files that the reference implementation refuses, or, where the name
// says so, reads as something that nobody means.
func attacks() []attack {
	deep := func(n int) string { return strings.Repeat("[", n) + strings.Repeat("]", n) }
	return []attack{
		// The length of the header.
		{"empty file", "",
			`byte 0: the file has 0 bytes: want at least 8, the length of the header`},
		{"length cut", "\x02\x00\x00",
			`byte 0: the file has 3 bytes: want at least 8, the length of the header`},
		{"header too long by one", raw(maxHeader+1, "{}"),
			`byte 0: the header has 100000001 bytes by its length: want at most 100000000; the file may not be a safetensors file`},
		{"header longest", raw(maxHeader, "{}"),
			`byte 0: the header has 100000000 bytes by its length, but only 2 follow: the file is truncated, or is not a safetensors file`},
		{"length of all bits", raw(1<<64-1, "{}"),
			`byte 0: the header has 18446744073709551615 bytes by its length: want at most 100000000; the file may not be a safetensors file`},
		{"length of the sign bit", raw(1<<63, "{}"),
			`byte 0: the header has 9223372036854775808 bytes by its length: want at most 100000000; the file may not be a safetensors file`},
		{"length past the end", raw(3, "{}"),
			`byte 0: the header has 3 bytes by its length, but only 2 follow: the file is truncated, or is not a safetensors file`},

		// JSON.
		{"no header", file("", 0),
			`byte 8: want '{' for the header, got the end`},
		{"not UTF-8", file("{\"a\xff\":{}}", 0),
			`byte 11: the JSON is not valid UTF-8`},
		{"not UTF-8 in white space", file("{} \xff", 0),
			`byte 11: the JSON is not valid UTF-8`},
		{"not UTF-8 after a replacement character", file("{\"\ufffd\xff\"}", 0),
			`byte 13: the JSON is not valid UTF-8`},
		{"surrogate as UTF-8", file("{\"\xed\xa0\x80\":{}}", 0),
			`byte 10: the JSON is not valid UTF-8`},
		{"byte order mark", file("\ufeff{}", 0),
			`byte 8: want '{' for the header, got '\ufeff'`},
		{"not JSON", file("hello", 0),
			`byte 8: want '{' for the header, got 'h'`},
		{"array", file("[]", 0),
			`byte 8: want '{' for the header, got '['`},
		{"null", file("null", 0),
			`byte 8: want '{' for the header, got 'n'`},
		{"NUL bytes as padding", file("{}\x00\x00", 0),
			`byte 10: want the end after the JSON, got '\x00'`},
		{"vertical tab as white space", file("{\v}", 0),
			`byte 9: want '"' for a key, got '\v'`},
		{"two values", file("{}{}", 0),
			`byte 10: want the end after the JSON, got '{'`},
		{"comment", file("{/**/}", 0),
			`byte 9: want '"' for a key, got '/'`},
		{"comma at the end", file(`{"__metadata__":{},}`, 0),
			`byte 27: want '"' for a key, got '}'`},
		{"comma alone", file(`{,}`, 0),
			`byte 9: want '"' for a key, got ','`},
		{"no colon", file(`{"a"}`, 0),
			`byte 12: want ':' after a key, got '}'`},
		{"no comma", file(`{"__metadata__":{}"a":1}`, 0),
			`byte 26: want ',' or '}' after a value, got '"'`},
		{"key without quotes", file(`{a:1}`, 0),
			`byte 9: want '"' for a key, got 'a'`},
		{"object does not end", file(`{"__metadata__":{}`, 0),
			`byte 26: want ',' or '}' after a value, got the end`},
		{"string does not end", file(`{"a`, 0),
			`byte 9: a string does not end`},
		{"string ends in an escape", file(`{"a\`, 0),
			`byte 11: a string does not end`},
		{"string ends in an escaped quote", file(`{"a\"`, 0),
			`byte 9: a string does not end`},
		{"control character in a name", file("{\"a\n\":1}", 0),
			`byte 11: a string has the control character 0x0a, which must be escaped`},
		{"unknown escape", file(`{"\x41":1}`, 0),
			`byte 10: a string has the unknown escape "\\x"`},
		{"short \\u escape", file(`{"\u12":1}`, 0),
			`byte 10: a string has "\u" without four hexadecimal digits`},
		{"sign in a \\u escape", file(`{"\u+123":1}`, 0),
			`byte 10: a string has "\u" without four hexadecimal digits`},
		{"\\u escape at the end", file(`{"\u12`, 0),
			`byte 10: a string has "\u" without four hexadecimal digits`},
		{"first half of a surrogate pair", file(`{"\ud800":1}`, 0),
			`byte 10: a string has half of a surrogate pair, "\ud800", without the other`},
		{"second half of a surrogate pair", file(`{"\udc00":1}`, 0),
			`byte 10: a string has half of a surrogate pair, "\udc00", without the other`},
		{"surrogate pair of two first halves", file(`{"\ud800\ud800":1}`, 0),
			`byte 10: a string has half of a surrogate pair, "\ud800", without the other`},
		{"surrogate and a letter", file(`{"\ud800A":1}`, 0),
			`byte 10: a string has half of a surrogate pair, "\ud800", without the other`},
		{"arrays nested deep", file(one(`"x":`+deep(126)), 0),
			`byte 143: tensor "a": arrays and objects are nested more than 127 levels deep`},
		{"objects nested deep", file(strings.Repeat(`{"a":`, 200), 0),
			`byte 643: tensor "a": arrays and objects are nested more than 127 levels deep`},
		{"arrays nested very deep", file(`{"a":`+strings.Repeat("[", 100_000), 0),
			`byte 13: tensor "a": want '{' for a tensor, got '['`},

		// The entries.
		{"entry is a number", file(`{"a":1}`, 0),
			`byte 13: tensor "a": want '{' for a tensor, got '1'`},
		{"entry is an array", file(`{"a":["U8",[2],[0,2]]}`, 2),
			`byte 13: tensor "a": want '{' for a tensor, got '['`},
		{"entry is null", file(`{"a":null}`, 0),
			`byte 13: tensor "a": want '{' for a tensor, got 'n'`},
		{"entry is empty", file(`{"a":{}}`, 0),
			`byte 9: tensor "a": dtype is missing`},
		{"dtype missing", file(one(shape2, offsets2), 2),
			`byte 9: tensor "a": dtype is missing`},
		{"shape missing", file(one(dtypeU8, offsets2), 2),
			`byte 9: tensor "a": shape is missing`},
		{"data_offsets missing", file(one(dtypeU8, shape2), 2),
			`byte 9: tensor "a": data_offsets is missing`},
		{"dtype twice", file(one(dtypeU8, dtypeU8, shape2, offsets2), 2),
			`byte 27: tensor "a": dtype occurs twice`},
		{"shape twice", file(one(dtypeU8, shape2, shape2, offsets2), 2),
			`byte 39: tensor "a": shape occurs twice`},
		{"data_offsets twice", file(one(dtypeU8, shape2, offsets2, offsets2), 2),
			`byte 60: tensor "a": data_offsets occurs twice`},
		{"name twice", file(`{"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},"b":{"dtype":"U8","shape":[0],"data_offsets":[2,2]},"\u0061":{"dtype":"U8","shape":[2],"data_offsets":[2,4]}}`, 4),
			`byte 113: tensor "a": duplicate name`},
		{"dtype unknown", file(one(`"dtype":"F128"`, shape2, offsets2), 2),
			`byte 22: tensor "a": the dtype "F128" is unknown`},
		{"dtype in small letters", file(one(`"dtype":"u8"`, shape2, offsets2), 2),
			`byte 22: tensor "a": the dtype "u8" is unknown`},
		{"dtype invalid", file(one(`"dtype":"invalid"`, shape2, offsets2), 2),
			`byte 22: tensor "a": the dtype "invalid" is unknown`},
		{"dtype empty", file(one(`"dtype":""`, shape2, offsets2), 2),
			`byte 22: tensor "a": the dtype "" is unknown`},
		{"dtype null", file(one(`"dtype":null`, shape2, offsets2), 2),
			`byte 22: tensor "a": want '"' for a dtype, got 'n'`},
		{"dtype a number", file(one(`"dtype":4`, shape2, offsets2), 2),
			`byte 22: tensor "a": want '"' for a dtype, got '4'`},
		{"shape a number", file(one(dtypeU8, `"shape":2`, offsets2), 2),
			`byte 35: tensor "a": want '[' for a shape, got '2'`},
		{"shape an object", file(one(dtypeU8, `"shape":{}`, offsets2), 2),
			`byte 35: tensor "a": want '[' for a shape, got '{'`},
		{"shape null", file(one(dtypeU8, `"shape":null`, offsets2), 2),
			`byte 35: tensor "a": want '[' for a shape, got 'n'`},
		{"dimension negative", file(one(dtypeU8, `"shape":[-2]`, offsets2), 2),
			`byte 36: tensor "a": a dimension is -2: want a whole number in digits alone`},
		{"dimension negative zero", file(one(dtypeU8, `"shape":[2,-0]`, offsets2), 2),
			`byte 38: tensor "a": a dimension is -0: want a whole number in digits alone`},
		{"dimension with a fraction", file(one(dtypeU8, `"shape":[2.0]`, offsets2), 2),
			`byte 36: tensor "a": a dimension is 2.0: want a whole number in digits alone`},
		{"dimension with an exponent", file(one(dtypeU8, `"shape":[2e0]`, offsets2), 2),
			`byte 36: tensor "a": a dimension is 2e0: want a whole number in digits alone`},
		{"dimension with a leading zero", file(one(dtypeU8, `"shape":[02]`, offsets2), 2),
			`byte 36: tensor "a": a dimension is 02: want a whole number in digits alone`},
		{"dimension with a plus", file(one(dtypeU8, `"shape":[+2]`, offsets2), 2),
			`byte 36: tensor "a": a dimension is +2: want a whole number in digits alone`},
		{"dimension in hexadecimal", file(one(dtypeU8, `"shape":[0x2]`, offsets2), 2),
			`byte 37: tensor "a": want ',' or ']' after a value, got 'x'`},
		{"dimension a string", file(one(dtypeU8, `"shape":["2"]`, offsets2), 2),
			`byte 36: tensor "a": a dimension: want a whole number, got '"'`},
		{"dimension null", file(one(dtypeU8, `"shape":[null]`, offsets2), 2),
			`byte 36: tensor "a": a dimension: want a whole number, got 'n'`},
		{"dimension an array", file(one(dtypeU8, `"shape":[[2]]`, offsets2), 2),
			`byte 36: tensor "a": a dimension: want a whole number, got '['`},
		{"dimension of 64 bits", file(one(dtypeU8, `"shape":[0,9223372036854775808]`, `"data_offsets":[0,0]`), 0),
			`byte 38: tensor "a": a dimension is 9223372036854775808: want at most 9223372036854775807`},
		{"dimension of 65 bits", file(one(dtypeU8, `"shape":[0,18446744073709551616]`, `"data_offsets":[0,0]`), 0),
			`byte 38: tensor "a": a dimension is 18446744073709551616: want at most 9223372036854775807`},
		{"dimension of many digits", file(one(dtypeU8, `"shape":[`+strings.Repeat("9", 1000)+`]`, offsets2), 2),
			`byte 36: tensor "a": a dimension is 999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999…: want at most 9223372036854775807`},
		{"shape ends in a comma", file(one(dtypeU8, `"shape":[2,]`, offsets2), 2),
			`byte 38: tensor "a": a dimension: want a whole number, got ']'`},
		{"shape without comma", file(one(dtypeU8, `"shape":[2 1]`, offsets2), 2),
			`byte 38: tensor "a": want ',' or ']' after a value, got '1'`},
		{"data_offsets a number", file(one(dtypeU8, shape2, `"data_offsets":2`), 2),
			`byte 54: tensor "a": want '[' for data_offsets, got '2'`},
		{"data_offsets empty", file(one(dtypeU8, shape2, `"data_offsets":[]`), 2),
			`byte 55: tensor "a": data_offsets: want a whole number, got ']'`},
		{"data_offsets of one", file(one(dtypeU8, shape2, `"data_offsets":[0]`), 2),
			`byte 56: tensor "a": want ',' for data_offsets, got ']'`},
		{"data_offsets of three", file(one(dtypeU8, shape2, `"data_offsets":[0,2,2]`), 2),
			`byte 58: tensor "a": want ']' after the second of data_offsets, got ','`},
		{"data_offsets negative", file(one(dtypeU8, shape2, `"data_offsets":[-2,0]`), 2),
			`byte 55: tensor "a": data_offsets is -2: want a whole number in digits alone`},
		{"data_offsets of 64 bits", file(one(dtypeU8, shape2, `"data_offsets":[0,18446744073709551615]`), 2),
			`byte 57: tensor "a": data_offsets is 18446744073709551615: want at most 9223372036854775807`},
		{"unknown field that is no JSON", file(one(dtypeU8, shape2, offsets2, `"x":nul`), 2),
			`byte 64: tensor "a": want a JSON value, got 'n'`},
		{"unknown field without value", file(one(dtypeU8, shape2, offsets2, `"x":`), 2),
			`byte 64: tensor "a": want a JSON value, got '}'`},
		{"unknown field with a number past float64", file(one(dtypeU8, shape2, offsets2, `"x":1e999`), 2),
			`byte 64: tensor "a": 1e999 overflows a float64`},
		{"unknown field with a leading zero", file(one(dtypeU8, shape2, offsets2, `"x":-01`), 2),
			`byte 64: tensor "a": -01 is not a number in JSON`},
		{"unknown field with a bare point", file(one(dtypeU8, shape2, offsets2, `"x":1.`), 2),
			`byte 64: tensor "a": 1. is not a number in JSON`},
		{"unknown field with a bare exponent", file(one(dtypeU8, shape2, offsets2, `"x":1e+`), 2),
			`byte 64: tensor "a": 1e+ is not a number in JSON`},
		{"unknown field with a bare minus", file(one(dtypeU8, shape2, offsets2, `"x":-`), 2),
			`byte 64: tensor "a": - is not a number in JSON`},
		{"unknown field with two points", file(one(dtypeU8, shape2, offsets2, `"x":1.2.3`), 2),
			`byte 64: tensor "a": 1.2.3 is not a number in JSON`},
		{"unknown field with half a surrogate pair", file(one(dtypeU8, shape2, offsets2, `"x":"\udfff"`), 2),
			`byte 65: tensor "a": a string has half of a surrogate pair, "\udfff", without the other`},
		{"metadata a string", file(`{"__metadata__":"pt"}`, 0),
			`byte 24: want '{' for __metadata__, got '"'`},
		{"metadata an array", file(`{"__metadata__":[]}`, 0),
			`byte 24: want '{' for __metadata__, got '['`},
		{"metadata with a number", file(`{"__metadata__":{"n":1}}`, 0),
			`byte 29: want '"' for a value of __metadata__, got '1'`},
		{"metadata with null", file(`{"__metadata__":{"n":null}}`, 0),
			`byte 29: want '"' for a value of __metadata__, got 'n'`},
		{"metadata with an object", file(`{"__metadata__":{"n":{}}}`, 0),
			`byte 29: want '"' for a value of __metadata__, got '{'`},
		{"metadata with a key twice", file(`{"__metadata__":{"n":"1","n":"2"}}`, 0),
			`byte 33: __metadata__ has the duplicate key "n"`},
		{"metadata twice", file(`{"__metadata__":{},"__metadata__":{}}`, 0),
			`byte 27: __metadata__ occurs twice`},
		{"metadata null and again", file(`{"__metadata__":null,"__metadata__":{}}`, 0),
			`byte 29: __metadata__ occurs twice`},
		{"metadata a tensor", file(`{"__metadata__":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}}`, 2),
			`byte 46: want '"' for a value of __metadata__, got '['`},
		{"metadata not null", file(`{"__metadata__":nil}`, 0),
			`byte 24: want a JSON value, got 'n'`},

		// The layout.
		{"hole at the beginning", file(one(dtypeU8, shape2, `"data_offsets":[1,3]`), 3),
			`byte 9: tensor "a": data_offsets [1,3] leave a gap: want a start at 0, the end of the previous tensor`},
		{"hole", file(`{"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},"b":{"dtype":"U8","shape":[2],"data_offsets":[3,5]}}`, 5),
			`byte 61: tensor "b": data_offsets [3,5] leave a gap: want a start at 2, the end of the previous tensor`},
		{"overlap", file(`{"b":{"dtype":"U8","shape":[2],"data_offsets":[1,3]},"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}}`, 3),
			`byte 9: tensor "b": data_offsets [1,3] overlap the previous tensor, which ends at 2`},
		{"two tensors in the same place", file(`{"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},"b":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}}`, 2),
			`byte 61: tensor "b": data_offsets [0,2] overlap the previous tensor, which ends at 2`},
		{"empty tensor inside another", file(`{"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},"b":{"dtype":"U8","shape":[0],"data_offsets":[1,1]}}`, 2),
			`byte 61: tensor "b": data_offsets [1,1] overlap the previous tensor, which ends at 2`},
		{"end before the beginning", file(`{"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},"b":{"dtype":"U8","shape":[2],"data_offsets":[2,0]}}`, 2),
			`byte 61: tensor "b": data_offsets [2,0] end before they start`},
		{"elements overflow", file(one(dtypeU8, `"shape":[4611686018427387904,4]`, offsets2), 2),
			`byte 9: tensor "a": shape [4611686018427387904 4] has more elements than 64 bits count`},
		{"elements overflow to what fits", file(one(dtypeU8, `"shape":[4294967296,4294967296,2]`, `"data_offsets":[0,0]`), 0),
			`byte 9: tensor "a": shape [4294967296 4294967296 2] has more elements than 64 bits count`},
		{"elements overflow before a zero", file(one(dtypeU8, `"shape":[4294967296,4294967296,0]`, `"data_offsets":[0,0]`), 0),
			`byte 9: tensor "a": shape [4294967296 4294967296 0] has more elements than 64 bits count`},
		{"bits overflow", file(one(`"dtype":"F64"`, `"shape":[288230376151711744]`, `"data_offsets":[0,0]`), 0),
			`byte 9: tensor "a": shape [288230376151711744] of F64 has more bits than 64 bits count`},
		{"half a byte", file(one(`"dtype":"F4"`, `"shape":[3]`, offsets2), 2),
			`byte 9: tensor "a": shape [3] of F4 takes 12 bits, which is not a whole number of bytes`},
		{"three quarters of a byte", file(one(`"dtype":"F6_E2M3"`, `"shape":[1]`, `"data_offsets":[0,1]`), 1),
			`byte 9: tensor "a": shape [1] of F6_E2M3 takes 6 bits, which is not a whole number of bytes`},
		{"bytes for another type", file(one(`"dtype":"F32"`, shape2, offsets2), 2),
			`byte 9: tensor "a": data_offsets [0,2] are 2 bytes, but shape [2] of F32 takes 8`},
		{"bytes for a longer shape", file(one(dtypeU8, `"shape":[3]`, offsets2), 2),
			`byte 9: tensor "a": data_offsets [0,2] are 2 bytes, but shape [3] of U8 takes 3`},
		{"bytes for an empty shape", file(one(dtypeU8, `"shape":[9,9,9,9,9,9,9,9,0]`, offsets2), 2),
			`byte 9: tensor "a": data_offsets [0,2] are 2 bytes, but shape [9 9 9 9 9 9 9 9 …] (9 dimensions) of U8 takes 0`},
		{"bytes for a scalar", file(one(dtypeU8, `"shape":[]`, offsets2), 2),
			`byte 9: tensor "a": data_offsets [0,2] are 2 bytes, but shape [] of U8 takes 1`},
		{"file too short", file(one(dtypeU8, shape2, offsets2), 1),
			`byte 62: the tensors take 2 bytes, but only 1 follow the header: the file is truncated`},
		{"file too long", file(one(dtypeU8, shape2, offsets2), 3),
			`byte 63: the tensors take 2 bytes, but 3 follow the header`},
		{"bytes without tensors", file(`{}`, 1),
			`byte 10: the tensors take 0 bytes, but 1 follow the header`},
		{"offsets to the end of int64", file(one(dtypeU8, `"shape":[9223372036854775807]`, `"data_offsets":[0,9223372036854775807]`), 2),
			`byte 9: tensor "a": shape [9223372036854775807] of U8 has more bits than 64 bits count`},
	}
}

// A curiosity is a file that is right, though a careless reader refuses it.
type curiosity struct {
	name    string
	file    string
	tensors []Tensor // places in the data
}

func curiosities() []curiosity {
	a := []Tensor{{"a", U8, []int{2}, 0, 2}}
	deep := func(n int) string { return strings.Repeat("[", n) + strings.Repeat("]", n) }
	return []curiosity{
		{"nothing", file("{}", 0), nil},
		{"nothing and padding", file("{}      ", 0), nil},
		{"white space", file(" \t\r\n{ \"a\" : { \"dtype\" : \"U8\" , \"shape\" : [ 2 ] , \"data_offsets\" : [ 0 , 2 ] } } \r\n\t", 2), a},
		{"metadata null", file(`{"__metadata__":null,"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}}`, 2), a},
		{"unknown fields", file(one(`"x":[-1.5e-7,true,false,null,{"y":"\ud83d\ude00"},[]]`, dtypeU8, `"x":0`, shape2, `"x":{}`, offsets2), 2), a},
		{"unknown field of the most depth", file(one(dtypeU8, shape2, offsets2, `"x":`+deep(125)), 2), a},
		{"unknown field with the largest number", file(one(dtypeU8, shape2, offsets2, `"x":1.7976931348623157e308`), 2), a},
		{"escapes in keys", file(`{"\u0061":{"d\u0074ype":"\u00558","sh\u0061pe":[2],"data\u005foffsets":[0,2]}}`, 2), a},
		{"name empty", file(`{"":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}}`, 2), []Tensor{{"", U8, []int{2}, 0, 2}}},
		{"name with NUL", file(`{"\u0000":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}}`, 2), []Tensor{{"\x00", U8, []int{2}, 0, 2}}},
		{"name like the metadata's", file(`{"__metadata___":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}}`, 2), []Tensor{{"__metadata___", U8, []int{2}, 0, 2}}},
		{"name of all escapes", file(`{"\"\\\/\b\f\n\r\t\u00E9\uD83D\uDE00\uffff":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}}`, 2), []Tensor{{"\"\\/\b\f\n\r\té😀\uffff", U8, []int{2}, 0, 2}}},
		{"name of what need not be escaped", file("{\"\x7f\u2028é😀/<>&'\":{\"dtype\":\"U8\",\"shape\":[2],\"data_offsets\":[0,2]}}", 2), []Tensor{{"\x7f\u2028é😀/<>&'", U8, []int{2}, 0, 2}}},
		{"scalar", file(`{"a":{"dtype":"F64","shape":[],"data_offsets":[0,8]}}`, 8), []Tensor{{"a", F64, []int{}, 0, 8}}},
		{"sub-byte types", file(`{"a":{"dtype":"F4","shape":[2,3],"data_offsets":[0,3]},"b":{"dtype":"F6_E3M2","shape":[4],"data_offsets":[3,6]}}`, 6), []Tensor{{"a", F4, []int{2, 3}, 0, 3}, {"b", F6E3M2, []int{4}, 3, 6}}},
		{"narrow before wide", file(`{"b":{"dtype":"F64","shape":[1],"data_offsets":[1,9]},"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}`, 9), []Tensor{{"a", U8, []int{1}, 0, 1}, {"b", F64, []int{1}, 1, 9}}},
		{"empty tensors everywhere", file(`{"z":{"dtype":"F4","shape":[0],"data_offsets":[2,2]},"c":{"dtype":"F32","shape":[4,0],"data_offsets":[0,0]},"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},"b":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},"y":{"dtype":"U8","shape":[0],"data_offsets":[2,2]}}`, 2),
			[]Tensor{{"b", U8, []int{0}, 0, 0}, {"c", F32, []int{4, 0}, 0, 0}, {"a", U8, []int{2}, 0, 2}, {"y", U8, []int{0}, 2, 2}, {"z", F4, []int{0}, 2, 2}}},
		{"empty tensor of the largest dimension", file(`{"a":{"dtype":"F64","shape":[0,9223372036854775807,9223372036854775807],"data_offsets":[0,0]}}`, 0), []Tensor{{"a", F64, []int{0, 1<<63 - 1, 1<<63 - 1}, 0, 0}}},
		{"a product of all bits and then 0", file(`{"a":{"dtype":"U8","shape":[4294967295,4294967297,0],"data_offsets":[0,0]}}`, 0), []Tensor{{"a", U8, []int{1<<32 - 1, 1<<32 + 1, 0}, 0, 0}}},
		{"many dimensions", file(one(dtypeU8, `"shape":[2`+strings.Repeat(",1", 999)+`]`, offsets2), 2), []Tensor{{"a", U8, append([]int{2}, ones(999)...), 0, 2}}},
	}
}

func ones(n int) []int {
	s := make([]int, n)
	for i := range s {
		s[i] = 1
	}
	return s
}
