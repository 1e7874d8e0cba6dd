package pickle

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// recorder turns everything into text, and allows the module "ok" only.
type recorder struct{}

type made struct{ text string }

func (recorder) Global(module, name string) (any, error) {
	if module != "ok" {
		return nil, fmt.Errorf("global %s.%s", module, name)
	}
	return &made{name}, nil
}

func (recorder) Call(global any, args Tuple) (any, error) {
	g, ok := global.(*made)
	if !ok {
		return nil, errors.New("it is not a global")
	}
	return &made{fmt.Sprintf("%s%v", g.text, args)}, nil
}

func (recorder) Build(object, state any) error {
	object.(*made).text += fmt.Sprintf("=%v", state)
	return nil
}

func (recorder) Persistent(id any) (any, error) { return &made{fmt.Sprint("at ", id)}, nil }

func TestObjects(t *testing.T) {
	for what, tc := range map[string]struct{ in, want string }{
		"call":       {"\x80\x02cok\nf\nK\x01\x85R.", "f[1]"},
		"new object": {"\x80\x04\x8c\x02ok\x8c\x01f\x93)\x81.", "f[]"},
		"state":      {"\x80\x02cok\nf\n)RK\x07b.", "f[]=7"},
		"persistent": {"\x80\x02K\x05Q.", "at 5"},
		"bytes":      {"\x80\x03cok\nf\nC\x01a\x85R.", "f[a]"},
	} {
		v, err := DecodeObjects(strings.NewReader(tc.in), nil, recorder{})
		require.NoError(t, err, what)
		require.Equal(t, tc.want, v.(*made).text, what)
		_, err = Decode(strings.NewReader(tc.in), nil)
		require.ErrorContains(t, err, "is not allowed", what)
	}
	v, err := DecodeObjects(strings.NewReader("\x80\x04\x8f(K\x01K\x02\x90."), nil, recorder{})
	require.NoError(t, err)
	require.Equal(t, &List{int64(1), int64(2)}, v)
}

func TestObjectMistakes(t *testing.T) {
	for in, says := range map[string]string{
		"\x80\x02cos\nsystem\n.":                          "global os.system",
		"\x80\x04\x8c\x02os\x8c\x06system\x93.":           "global os.system",
		"\x80\x04K\x01\x8c\x06system\x93.":                "the module and the name of a global are a int64 and a string",
		"\x80\x02K\x01)R.":                                "it is not a global",
		"\x80\x02cok\nf\nK\x01R.":                         "a call has arguments of type int64: want a tuple",
		"\x80\x02R.":                                      "a call without two values on the stack",
		"\x80\x02)(R.":                                    "a call without two values on the stack",
		"\x80\x02K\x01(K\x01b.":                           "the state of an object without two values",
		"\x80\x02Q.":                                      "a persistent identifier is not on the stack",
		"\x80\x02\x90.":                                   "items of a set without a mark",
		"\x80\x02c" + strings.Repeat("x", 300) + "\nf\n.": "longer than 256 bytes",
		"\x80\x02cok\nf":                                  "unexpected EOF",
		"\x80\x02c\xff\nf\n.":                             "not valid UTF-8",
		"\x80\x02(K\x01\x90.":                             "a container that is not on the stack",
		"\x80\x02C\x05ab":                                 "unexpected EOF",
		"\x80\x02B\xff\xff\x7f\x00ab":                     "unexpected EOF",
		"\x80\x02i":                                       `opcode 0x69 ('i') is not allowed`,
	} {
		_, err := DecodeObjects(strings.NewReader(in), nil, recorder{})
		require.ErrorContains(t, err, says, "%q", in)
	}
}
