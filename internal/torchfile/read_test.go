package torchfile

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"runtime/metrics"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/internal/env"
)

// recordings returns the committed files and those of a GPU host, which PyTorch wrote.
func recordings(t testing.TB) []string {
	t.Helper()
	all, err := filepath.Glob("testdata/*.pt")
	require.NoError(t, err)
	require.NotEmpty(t, all)
	if env.Fixtures.IsSet() {
		more, err := filepath.Glob(filepath.Join(env.Fixtures.Value(), "torch", "*.pt"))
		require.NoError(t, err)
		all = append(all, more...)
	}
	return all
}

type recorded struct {
	DType  string
	Shape  []int
	SHA256 string
}

func TestRecordings(t *testing.T) {
	for _, path := range recordings(t) {
		text, err := os.ReadFile(strings.TrimSuffix(path, ".pt") + ".json")
		require.NoError(t, err)
		var want map[string]recorded
		require.NoError(t, json.Unmarshal(text, &want))
		data, err := os.ReadFile(path)
		require.NoError(t, err)
		f, err := Read(bytes.NewReader(data), int64(len(data)))
		require.NoError(t, err, path)
		got := map[string]recorded{}
		for i := range f.Tensors {
			x := &f.Tensors[i]
			got[x.Name] = recorded{x.DType.String(), x.Shape, digestOf(data, x)}
		}
		require.Equal(t, want, got, path)
	}
}

// digestOf hashes the elements in row-major order.
func digestOf(data []byte, x *Tensor) string {
	h := sha256.New()
	var walk func(dim int, at int64)
	walk = func(dim int, at int64) {
		if dim == len(x.Shape) {
			h.Write(data[at : at+int64(x.Size())])
			return
		}
		for i := range x.Shape[dim] {
			walk(dim+1, at+int64(i*x.Strides[dim]*x.Size()))
		}
	}
	walk(0, x.Offset)
	return hex.EncodeToString(h.Sum(nil))
}

func TestLayoutOfRecordings(t *testing.T) {
	f := readFixture(t, "views")
	at := map[string]*Tensor{}
	for i := range f.Tensors {
		at[f.Tensors[i].Name] = &f.Tensors[i]
	}
	require.Zero(t, at["base"].Offset%64, "torch aligns storages")
	require.Equal(t, at["base"].Offset, at["again"].Offset, "they share a storage")
	for name, want := range map[string]bool{"base": true, "rows": true, "transposed": false, "columns": false, "second": false, "expanded": false, "empty": true, "scalar": true} {
		require.Equal(t, want, at[name].Contiguous(), name)
	}
}

func TestValues(t *testing.T) {
	f := readFixture(t, "nested")
	require.Equal(t, map[string]string{"optimizer.param_groups.0.lr": "0.001", "optimizer.param_groups.0.betas.0": "0.9", "optimizer.param_groups.0.betas.1": "0.999",
		"optimizer.param_groups.0.amsgrad": "false", "optimizer.param_groups.0.params.0": "0", "epoch": "12", "name": `"a\nname"`, "nothing": "null"}, f.Values)
}

func readFixture(t *testing.T, name string) *File {
	t.Helper()
	data, err := os.ReadFile("testdata/" + name + ".pt")
	require.NoError(t, err)
	f, err := Read(bytes.NewReader(data), int64(len(data)))
	require.NoError(t, err)
	return f
}

// archiveOf returns an archive of entries, with sizes and positions in zip64 fields if large is
// true.
func archiveOf(large bool, entries ...string) []byte {
	var b, dir []byte
	le := binary.LittleEndian
	for i := 0; i < len(entries); i += 2 {
		name, data := entries[i], entries[i+1]
		at, size := uint64(len(b)), uint64(len(data))
		b = le.AppendUint32(b, localSignature)
		b = append(b, make([]byte, 22)...)
		b = le.AppendUint16(b, uint16(len(name)))
		b = le.AppendUint16(b, 0)
		b = append(append(b, name...), data...)
		var extra []byte
		if large {
			extra = le.AppendUint16(le.AppendUint16(nil, extraZip64), 24)
			for _, v := range []uint64{size, size, at} {
				extra = le.AppendUint64(extra, v)
			}
			at, size = 1<<32-1, 1<<32-1
		}
		dir = append(le.AppendUint32(dir, entrySignature), make([]byte, 16)...)
		dir = le.AppendUint32(le.AppendUint32(dir, uint32(size)), uint32(size))
		dir = le.AppendUint16(le.AppendUint16(dir, uint16(len(name))), uint16(len(extra)))
		dir = le.AppendUint32(append(dir, make([]byte, 10)...), uint32(at))
		dir = append(append(dir, name...), extra...)
	}
	return append(b, endOf(large, uint64(len(entries)/2), uint64(len(b)), dir)...)
}

func endOf(large bool, count, at uint64, dir []byte) []byte {
	le, n := binary.LittleEndian, uint64(len(dir))
	b := slices.Clone(dir)
	if large {
		b = append(le.AppendUint32(b, end64Signature), make([]byte, 28)...)
		for _, v := range []uint64{count, n, at} {
			b = le.AppendUint64(b, v)
		}
		b = append(le.AppendUint32(b, locatorSignature), 0, 0, 0, 0)
		b = append(le.AppendUint64(b, at+n), 1, 0, 0, 0)
		count, n, at = 1<<16-1, 1<<32-1, 1<<32-1
	}
	b = append(le.AppendUint32(b, endSignature), 0, 0, 0, 0)
	b = le.AppendUint16(le.AppendUint16(b, uint16(count)), uint16(count))
	b = le.AppendUint32(le.AppendUint32(b, uint32(n)), uint32(at))
	return append(b, 0, 0)
}

// pickled is a pickle of a tensor with a storage "0", and the given numbers.
func pickled(offset, size, stride, elements string) string {
	return "\x80\x02ctorch._utils\n_rebuild_tensor_v2\n((X\x07\x00\x00\x00storagectorch\nFloatStorage\nX\x01\x00\x00\x000X\x03\x00\x00\x00cpu" + elements + "tQ" +
		offset + size + "\x85" + stride + "\x85\x89ccollections\nOrderedDict\n)RtR."
}

// expanded is pickled without its first and last operation, of n equal elements.
func expanded(n uint32) string {
	one := pickled("K\x00", "J"+string(binary.LittleEndian.AppendUint32(nil, n)), "K\x00", "K\x03")
	return one[2 : len(one)-1]
}

// TestExpanded: views may repeat elements up to the limit.
func TestExpanded(t *testing.T) {
	b := archiveOf(false, "x/data.pkl", "\x80\x02("+expanded(1<<27)+expanded(1<<27)+"t.", "x/data/0", "aaaabbbbcccc")
	f, err := Read(bytes.NewReader(b), int64(len(b)))
	require.NoError(t, err, "1 GiB")
	require.Len(t, f.Tensors, 2)
	require.NoError(t, CheckBytes(64<<30, 1<<30))
	require.Error(t, CheckBytes(64<<30+1, 1<<30))
}

func TestLargeArchive(t *testing.T) {
	for _, large := range []bool{false, true} {
		b := archiveOf(large, "x/data.pkl", pickled("K\x01", "K\x02", "K\x01", "K\x03"), "x/data/0", "aaaabbbbcccc")
		f, err := Read(bytes.NewReader(b), int64(len(b)))
		require.NoError(t, err)
		require.Len(t, f.Tensors, 1)
		require.Equal(t, "bbbb", string(b[f.Tensors[0].Offset:][:4]))
	}
}

func TestMistakes(t *testing.T) {
	good := pickled("K\x01", "K\x02", "K\x01", "K\x03")
	with := func(pickle string, more ...string) []byte {
		return archiveOf(false, append([]string{"x/data.pkl", pickle, "x/data/0", "aaaabbbbcccc"}, more...)...)
	}
	cut := with(good)
	compressed := with(good)
	compressed[bytes.Index(compressed, []byte("PK\x01\x02"))+10] = 8
	encrypted := with(good)
	encrypted[bytes.Index(encrypted, []byte("PK\x01\x02"))+8] = 1
	doubles := strings.Replace(pickled("K\x00", "\x8a\x08\xff\xff\xff\xff\xff\xff\xff\x0f", "K\x00", "K\x01"), "FloatStorage", "DoubleStorage", 1)
	for what, tc := range map[string]struct {
		in   []byte
		says string
	}{
		"empty":           {nil, "does not begin like a zip archive"},
		"not a zip":       {[]byte("hello, this is a text"), "does not begin like a zip archive"},
		"legacy":          {[]byte("\x80\x02\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19."), "the format before PyTorch 1.6"},
		"cut":             {cut[:len(cut)-30], "it has no directory at its end: the file is truncated"},
		"compressed":      {compressed, `entry "x/data.pkl" is compressed`},
		"encrypted":       {encrypted, "is encrypted"},
		"no pickle":       {archiveOf(false, "x/data/0", "a"), "no entry data.pkl"},
		"two pickles":     {with(good, "y/data.pkl", good), "two entries data.pkl"},
		"TorchScript":     {with(good, "x/constants.pkl", ""), "TorchScript"},
		"big endian":      {with(good, "x/byteorder", "big"), `its byte order is "big": want little`},
		"a name twice":    {with(good, "x/data/0", ""), `two entries have the name "x/data/0"`},
		"no storage":      {archiveOf(false, "x/data.pkl", good), `lacks the entry "x/data/0"`},
		"short storage":   {with(pickled("K\x01", "K\x02", "K\x01", "K\x04")), `storage "0" has 12 bytes: want 4 elements of F32`},
		"long tensor":     {with(pickled("K\x01", "K\x03", "K\x01", "K\x03")), "from element 1: its storage has 3 elements"},
		"long stride":     {with(pickled("K\x00", "K\x02", "K\x03", "K\x03")), "its storage has 3 elements"},
		"negative stride": {with(pickled("K\x02", "K\x02", "J\xff\xff\xff\xff", "K\x03")), "want numbers of 0 or more"},
		"huge shape":      {with(pickled("K\x00", "\x8a\x08\xff\xff\xff\xff\xff\xff\xff\x7f", "K\x00", "K\x03")), "larger than any memory"},
		"bytes overflow":  {with(doubles), "larger than any memory"},
		"bits overflow":   {with(pickled("K\x00", "\x8a\x08\xff\xff\xff\xff\xff\xff\xff\x0f", "K\x00", "K\x03")), "larger than any memory"},
		"expanded":        {with(pickled("K\x00", "\x8a\x08\x00\x00\x00\x00\x01\x00\x00\x00", "K\x00", "K\x03")), `tensor "tensor" of shape [4294967296]: it has 17179869184 bytes or more of tensors in `},
		"expanded often":  {with("\x80\x02(" + strings.Repeat(expanded(1<<27), 3) + "t."), `tensor "2" of shape [134217728]: it has 1610612736 bytes`},
		"a call":          {with("\x80\x02cos\nsystem\nX\x01\x00\x00\x00x\x85R."), "it has the global os.system: only tensors"},
		"numpy":           {with("\x80\x02cnumpy.core.multiarray\nscalar\n."), "the global numpy.core.multiarray.scalar"},
		"quantised":       {with("\x80\x02ctorch._utils\n_rebuild_qtensor\n."), "the global torch._utils._rebuild_qtensor"},
		"complex128":      {with("\x80\x02ctorch\nComplexDoubleStorage\n."), "the global torch.ComplexDoubleStorage"},
		"conjugated":      {with(strings.Replace(good, "RtR.", "R}X\x04\x00\x00\x00conj\x88stR.", 1)), "lazy arithmetic: call resolve_conj()"},
		"same name":       {with("\x80\x02}(X\x01\x00\x00\x00aK\x01X\x01\x00\x00\x00aK\x02u."), `two values have the name "a"`},
		"list as key":     {with("\x80\x02}K\x01\x85K\x02s."), "a dictionary has a key of type torchfile.Tuple"},
		"itself":          {with("\x80\x02]q\x00h\x00a."), "more than 64 containers"},
		"type of a type":  {with("\x80\x02ctorch._tensor\n_rebuild_from_type_v2\n(h\x00tR."), "memo"},
	} {
		_, err := Read(bytes.NewReader(tc.in), int64(len(tc.in)))
		require.ErrorContains(t, err, tc.says, what)
	}
}

// laughs is a pickle of tuples in each other, whose size doubles with each level.
func laughs(levels int) string {
	s := "\x80\x02K\x01q\x00"
	for i := range levels {
		s += "h" + string(rune(i)) + "\x86q" + string(rune(i+1))
	}
	return s + "."
}

// allocated returns how many bytes the process has allocated so far.
func allocated() uint64 {
	sample := []metrics.Sample{{Name: "/gc/heap/allocs:bytes"}}
	metrics.Read(sample)
	return sample[0].Value.Uint64()
}

// TestMemoryIsBounded: hostile files take little memory.
func TestMemoryIsBounded(t *testing.T) {
	const most = 64 << 20
	huge := archiveOf(true, "x/data.pkl", "")
	binary.LittleEndian.PutUint64(huge[bytes.Index(huge, []byte("PK\x06\x06"))+40:], 1<<40)
	for what, in := range map[string][]byte{
		"a huge directory":     huge,
		"an exponential tuple": archiveOf(false, "x/data.pkl", laughs(60)),
		"a huge text":          archiveOf(false, "x/data.pkl", "\x80\x02X\xff\xff\xff\x0fabc"),
		"a deep list":          archiveOf(false, "x/data.pkl", "\x80\x02"+strings.Repeat("]", 100000)),
	} {
		before := allocated()
		_, err := Read(bytes.NewReader(in), int64(len(in)))
		took := allocated() - before
		require.Error(t, err, what)
		require.Less(t, took, uint64(most), what)
	}
}

// TestMemoryOfManyValues: values that share others, or of one byte each, take memory in proportion to the pickle.
func TestMemoryOfManyValues(t *testing.T) {
	const n = 400_000
	many := "(" + strings.Repeat("K\x01", mostDepth) + "t"
	shared := "((X\x07\x00\x00\x00storagectorch\nFloatStorage\nX\x01\x00\x00\x000X\x03\x00\x00\x00cpuK\x01tQK\x00" + many + many + "\x89Ntq\x01ctorch._utils\n_rebuild_tensor_v2\nq\x00"
	name := strings.Repeat("n", 60_000)
	for what, text := range map[string]string{
		"tensors of one shape":      shared + strings.Repeat("h\x00h\x01R", n) + "l.",
		"empty lists":               "](" + strings.Repeat("]", 4*n) + "e.",
		"tuples of one value":       "](" + strings.Repeat("K\x01\x85", 4*n) + "e.",
		"a memo":                    "]" + strings.Repeat("\x94", 8*n) + ".",
		"values on the stack":       "(" + strings.Repeat("N", 8*n) + "l.",
		"marks":                     strings.Repeat("(", 8*n) + ".",
		"a long name of many lists": "}X\x60\xea\x00\x00" + name + "]q\x00](" + strings.Repeat("h\x00", n) + "es.",
	} {
		in := archiveOf(false, "x/data.pkl", "\x80\x02"+text, "x/data/0", "aaaa")
		before := allocated()
		_, err := Read(bytes.NewReader(in), int64(len(in)))
		took := allocated() - before
		require.Error(t, err, what)
		require.Less(t, took, uint64(4*(memorySlack+memoryOfByte*len(in))), what) // what a slice had before it grew counts as well
	}
}

// A long list of numbers, such as the order of a data set, is one value. With a name for each number it would take too much memory.
func TestLongListIsOneValue(t *testing.T) {
	const n = 1_500_000 // in groups of 1,000, as Python writes them
	in := archiveOf(false, "x/data.pkl", "\x80\x02}(X\x05\x00\x00\x00order](K\x01\x88G\x7f\xf0\x00\x00\x00\x00\x00\x00e"+strings.Repeat("("+strings.Repeat("K\x07", 1000)+"e", n/1000)+"X\x05\x00\x00\x00short](K\x02K\x03eu.", "x/data/0", "aaaa")
	f, err := Read(bytes.NewReader(in), int64(len(in)))
	require.NoError(t, err)
	require.Len(t, f.Values, 3)
	require.Equal(t, []string{"2", "3"}, []string{f.Values["short.0"], f.Values["short.1"]})
	require.Equal(t, `[1,true,"+Inf"`+strings.Repeat(",7", n)+"]", f.Values["order"])
}

// FuzzRead: no input panics, tensors lie in the file, and memory is proportional to the input.
func FuzzRead(f *testing.F) {
	for _, path := range recordings(f) {
		data, err := os.ReadFile(path)
		require.NoError(f, err)
		f.Add(data)
	}
	f.Add(archiveOf(true, "x/data.pkl", pickled("K\x01", "K\x02", "K\x01", "K\x03"), "x/data/0", "aaaabbbbcccc"))
	f.Fuzz(func(t *testing.T, data []byte) {
		before := allocated()
		file, err := Read(bytes.NewReader(data), int64(len(data)))
		took := allocated() - before
		require.Less(t, took, uint64(4*(memorySlack+memoryOfByte*len(data))))
		if err != nil {
			return
		}
		for i := range file.Tensors {
			x := &file.Tensors[i]
			n, err := span(x.Shape, x.Strides)
			require.NoError(t, err)
			require.LessOrEqual(t, x.Offset+int64(n*x.Size()), int64(len(data)))
		}
	})
}

// FuzzPickle is FuzzRead for the pickle in a valid archive.
func FuzzPickle(f *testing.F) {
	f.Add([]byte(pickled("K\x01", "K\x02", "K\x01", "K\x03")))
	f.Add([]byte(laughs(5)))
	f.Add([]byte("\x80\x02}(X\x01\x00\x00\x00actorch\nSize\n(K\x01K\x02t\x85RX\x01\x00\x00\x00bctorch\ndevice\nX\x04\x00\x00\x00cudaK\x00\x86Ru."))
	f.Fuzz(func(t *testing.T, text []byte) {
		data := archiveOf(false, "x/data.pkl", string(text), "x/data/0", "aaaabbbbcccc")
		file, err := Read(bytes.NewReader(data), int64(len(data)))
		if err != nil {
			return
		}
		for i := range file.Tensors {
			require.LessOrEqual(t, file.Tensors[i].Offset, int64(len(data)))
		}
	})
}

// Files of torch.save before PyTorch 1.6 get one message in all protocols of pickle, and a TorchScript archive gets its own.
func TestFilesThatMustBeConverted(t *testing.T) {
	for protocol := range 6 {
		b, err := os.ReadFile(fmt.Sprintf("testdata/legacy/proto%d.pt", protocol))
		require.NoError(t, err)
		require.True(t, Is(b[:min(len(b), startBytes)]), protocol)
		_, err = Read(bytes.NewReader(b), int64(len(b)))
		require.ErrorContains(t, err, "the format before PyTorch 1.6", protocol)
	}
	b, err := os.ReadFile("testdata/legacy/script.pt")
	require.NoError(t, err)
	_, err = Read(bytes.NewReader(b), int64(len(b)))
	require.ErrorContains(t, err, "it is a TorchScript program")
}
