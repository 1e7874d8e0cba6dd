package analyze

import (
	"bufio"
	"bytes"
	"compress/gzip"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"

	"github.com/klauspost/compress/zstd"

	"github.com/gochorus/chorus/internal/safe"
	"github.com/gochorus/chorus/internal/torchfile"
)

// Limits of a file. A recorder has at most 1<<20 operations.
const (
	mostFileBytes  = 1 << 30
	mostValueBytes = 16 << 20 // of an entry, or of the configuration
	mostEntries    = 4 << 20
	fewEntries     = 4096    // that files of any size may have
	bytesOfEntry   = 64      // of further entries, at least; those of PyTorch and of Chorus have 100 to 1000
	somePacked     = 1 << 16 // entries that compressed files of any size may have
	packedBytes    = 4       // of further entries, at least: their times differ
	mostRanks      = 1 << 20
	mostGroups     = 1 << 16
	mostText       = 512
	mostDepth      = 16
	mostWindow     = 64 << 20 // of a file that zstd has compressed
	mostValues     = 16 << 20 // of a pickle
	fewValues      = 1 << 20  // that any pickle may have if the values that it shares count each time
	valuesOfByte   = 8        // of further ones
)

// A dump is the content of a file.
type dump struct {
	file    string
	at      int // of its File
	config  map[string]rawConfig
	source  *rawSource // nil if PyTorch wrote it
	service *RASAnswer // the file has an answer of NCCL's RAS service, and nothing else
	entries []entry
	texts   texts
	read    *limited // the uncompressed file

	// Of PyTorch's dumps.
	all                 []int // the ranks of the largest group; nil if the file has the ranks of no group, as gloo's have not
	candidates          []int // the ranks that may have written the file
	world               int   // the rank; -1 if not known
	eliminated, guessed bool  // how it is known; see node
	unnamed             bool  // the ranks of its groups are those of the files
}

// isService matches the begin of an answer of NCCL's RAS service.
var isService = regexp.MustCompile(`^\s*\{\s*"nccl_version"`)

// decode reads a dump in JSON or, if it begins like one, as a pickle. It also reads an answer of NCCL's
// RAS service.
func decode(r io.Reader) (*dump, error) {
	d := &dump{texts: texts{}, read: &limited{r: r, most: mostFileBytes}}
	b := bufio.NewReader(d.read)
	switch begin, _ := b.Peek(4); {
	case bytes.HasPrefix(begin, []byte{0x1f, 0x8b}):
		z, err := gzip.NewReader(b)
		if err != nil {
			return nil, err
		}
		b = d.unpack(z)
	case bytes.Equal(begin, []byte{0x28, 0xb5, 0x2f, 0xfd}):
		z, err := zstd.NewReader(b, zstd.WithDecoderConcurrency(1), zstd.WithDecoderMaxMemory(mostWindow))
		if err != nil {
			return nil, err
		}
		defer z.Close()
		b = d.unpack(z)
	}
	begin, err := b.Peek(1)
	switch {
	case err == io.EOF:
		return nil, errors.New("the file is empty")
	case err != nil:
		return nil, err
	case begin[0] == 0x80:
		err = d.readPickle(b)
	case beginsLike(b, isService):
		return d, d.readService(b)
	default:
		err = d.readJSON(b)
	}
	if safe.EndsEarly(err) {
		err = errors.New("the file is truncated: the process ended while it wrote the file, or the copy is incomplete")
	}
	d.setQueued()
	if err == nil && d.config == nil {
		err = errors.New(`the file is not a dump of a flight recorder: it has no "pg_config"`)
	}
	return d, err
}

func beginsLike(b *bufio.Reader, what *regexp.Regexp) bool {
	begin, _ := b.Peek(64) // a shorter file has fewer bytes
	return what.Match(begin)
}

func (d *dump) readService(r io.Reader) error {
	b, err := io.ReadAll(io.LimitReader(r, mostValueBytes+1))
	if err == nil && len(b) > mostValueBytes {
		err = fmt.Errorf("the answer of NCCL's RAS service has more than %d bytes", mostValueBytes)
	}
	if err == nil {
		d.service, err = DecodeRAS(b)
	}
	return err
}

// A limited fails after a number of bytes.
type limited struct {
	r      io.Reader
	n      int64 // bytes read
	most   int64
	packed *limited // what r decompresses, or nil
}

// unpackSlack is how many bytes any compressed file may expand to. A longer one may expand to safe.UnzipRatio times its size.
// Stacks that are the same in all entries become much shorter: 20,000 entries with 30 frames have 80 MB, and zstd makes 0.1 MB of them.
const unpackSlack = 256 << 20

func (l *limited) Read(b []byte) (int, error) {
	switch {
	case l.n >= l.most:
		return 0, fmt.Errorf("the file has more than %d bytes", l.most)
	case l.packed != nil && l.n-unpackSlack > safe.UnzipRatio*l.packed.n:
		return 0, fmt.Errorf("%d compressed bytes expand to more than %d: if you trust the file, decompress it first", l.packed.n, l.n)
	}
	n, err := l.r.Read(b[:min(int64(len(b)), l.most-l.n)])
	l.n += int64(n)
	return n, err
}

// unpack returns a reader of the uncompressed file.
func (d *dump) unpack(r io.Reader) *bufio.Reader {
	d.read = &limited{r: r, most: mostFileBytes, packed: d.read}
	return bufio.NewReader(d.read)
}

// readJSON reads the outermost object, and the entries one by one.
func (d *dump) readJSON(r io.Reader) error {
	f, begun := safe.NewJSON(r, mostValueBytes), false
	err := f.Object(func(key string) error {
		begun = true
		read := func(to any) error { return f.Value(key, to) }
		if key == "entries" {
			return f.Each(key, func(int) error { return d.addEntry(read) })
		}
		return d.field(key, read)
	})
	if err != nil && !begun {
		return fmt.Errorf("the file is not a dump of a flight recorder: %w", err)
	}
	return err
}

// field reads the value of a key of the outermost object.
func (d *dump) field(key string, read func(any) error) error {
	switch key {
	case "pg_config":
		if err := read(&d.config); err != nil {
			return err
		}
		if len(d.config) > mostGroups {
			return fmt.Errorf("the file has %d groups: want at most %d", len(d.config), mostGroups)
		}
		return nil
	case "chorus":
		if err := read(&d.source); err != nil {
			return err
		}
		safe.Record(d.source)
		return nil
	}
	var ignored json.RawMessage
	return read(&ignored)
}

func (d *dump) addEntry(read func(any) error) error {
	switch n := len(d.entries); {
	case n == mostEntries:
		return fmt.Errorf("the file has more than %d entries", mostEntries)
	case n >= fewEntries && int64(n-fewEntries) > d.read.n/bytesOfEntry:
		return fmt.Errorf("the file has more than %d entries in %d bytes: no recorder writes entries of so few bytes", n, d.read.n)
	case n >= somePacked && d.read.packed != nil && int64(n-somePacked) > d.read.packed.n/packedBytes:
		return fmt.Errorf("the file has more than %d entries in %d compressed bytes: if you trust the file, decompress it first", n, d.read.packed.n)
	}
	var raw rawEntry
	if err := read(&raw); err != nil {
		return fmt.Errorf("entry %d: %w", len(d.entries), err)
	}
	safe.Record(&raw)
	e, err := raw.entry(d.texts)
	if err == nil && e.op == "coalesced" {
		d.setCoalesced(&e)
		return nil
	}
	if err == nil {
		d.entries = append(d.entries, e)
	}
	return err
}

// setCoalesced gives the operations of a coalesced call, whose own entries have
// no state, the state of PyTorch's entry for the call, which follows them.
func (d *dump) setCoalesced(call *entry) {
	for i := len(d.entries) - 1; i >= 0; i-- {
		e := &d.entries[i]
		if e.group != call.group || e.groupName != call.groupName || e.seq != call.seq || e.transfers != call.transfers {
			return
		}
		e.started, e.completed = e.started || call.started, e.completed || call.completed
	}
}

// setQueued marks operations of PyTorch whose streams have not reached them. That is known if the dump has times of starts
// (TORCH_NCCL_ENABLE_TIMING); without them, all operations that have not completed look alike.
func (d *dump) setQueued() {
	if d.fromChorus() || !slices.ContainsFunc(d.entries, func(e entry) bool { return e.timed }) {
		return
	}
	for i := range d.entries {
		e := &d.entries[i]
		e.queued = !e.completed && !e.started
	}
}

// readPickle reads a dump of PyTorch, and refuses a pickle with classes or
// calls.
func (d *dump) readPickle(r io.Reader) error {
	v, err := torchfile.DecodePickle(r, &torchfile.PickleLimits{Bytes: mostFileBytes / 4, Values: mostValues})
	if err != nil {
		return err
	}
	top, ok := v.(*torchfile.Dict)
	if !ok {
		return errors.New("the file is not a dump of a flight recorder: the pickle is not a dictionary")
	}
	p := &plainData{left: fewValues + valuesOfByte*d.read.n, text: unpackSlack + safe.UnzipRatio*d.read.n}
	for _, item := range *top {
		key, _ := item.Key.(string)
		list, isList := item.Value.(*torchfile.List)
		switch {
		case key == "entries" && isList:
			for _, e := range *list {
				if err := d.addEntry(p.reader(e)); err != nil {
					return err
				}
			}
		case key == "entries" || key == "pg_config" || key == "chorus":
			if err := d.field(key, p.reader(item.Value)); err != nil {
				return err
			}
		}
	}
	return nil
}

// plainData converts values of a pickle, which may contain themselves and share long texts, to JSON. PyTorch's entries share the
// frames of their stacks, and names of C++ functions have hundreds of bytes.
type plainData struct {
	left  int64 // values
	text  int64 // bytes of texts that are left
	entry int64 // bytes of texts that are left of an entry, or of the configuration
}

func (p *plainData) reader(v any) func(any) error {
	return func(to any) error {
		p.entry = mostValueBytes
		v, err := p.convert(v, 0)
		if err != nil {
			return err
		}
		text, err := json.Marshal(v)
		if err != nil {
			return err
		}
		return json.Unmarshal(text, to)
	}
}

// take counts a text.
func (p *plainData) take(text string) error {
	p.text, p.entry = p.text-int64(len(text)), p.entry-int64(len(text))
	if p.text < 0 || p.entry < 0 {
		return fmt.Errorf("the texts of an entry have more than %d bytes, or all are much longer than the file, because values share them", mostValueBytes)
	}
	return nil
}

func (p *plainData) convert(v any, depth int) (any, error) {
	if p.left--; p.left < 0 || depth > mostDepth {
		return nil, fmt.Errorf("the pickle has more than %d values and %d for each byte, or values nested more than %d deep", fewValues, valuesOfByte, mostDepth)
	}
	switch v := v.(type) {
	case *torchfile.Dict:
		m := map[string]any{}
		for _, item := range *v {
			x, err := p.convert(item.Value, depth+1)
			if err != nil {
				return nil, err
			}
			key, ok := item.Key.(string)
			if !ok {
				continue // no key of a dump; the text of a tuple of tuples can be longer than any memory
			}
			if err := p.take(key); err != nil {
				return nil, err
			}
			m[key] = x
		}
		return m, nil
	case *torchfile.List:
		return p.list(*v, depth)
	case torchfile.Tuple:
		return p.list(v, depth)
	case string:
		return v, p.take(v)
	}
	return v, nil
}

func (p *plainData) list(from []any, depth int) (any, error) {
	list := make([]any, 0, min(len(from), 16))
	for _, x := range from {
		y, err := p.convert(x, depth+1)
		if err != nil {
			return nil, err
		}
		list = append(list, y)
	}
	return list, nil
}

// mostFiles limits the files of a job; a rank writes one for each communicator that fails.
const mostFiles = 1 << 16

// A File is a file that was read, or could not be read.
type File struct {
	Name  string `json:"file"`
	From  string `json:"from"` // "chorus", "torch" or "ras"
	Error string `json:"error,omitempty"`
	Job   string `json:"job,omitempty"` // if the files are of several jobs
}

// Load reads the dumps of all ranks, in files and in folders, but not in
// folders within them. A file that cannot be read is a finding, not an error.
// pattern finds the ranks of PyTorch's dumps in their paths by its first group
// in parentheses; with nil they are found as [dump.setRank] describes. If the
// files are of several jobs, the report has a part for each.
func Load(paths []string, pattern *regexp.Regexp) (*Job, error) {
	names, err := list(paths)
	if err != nil {
		return nil, err
	}
	var dumps []*dump
	var files []File
	for i, name := range names {
		f := File{Name: safe.Text(name), From: "chorus"}
		d, err := loadFile(name)
		if err == nil {
			d.at = i
			switch {
			case d.service != nil:
				f.From = "ras"
			case !d.fromChorus():
				f.From = "torch"
			}
			if err = d.setRank(pattern); err == nil {
				dumps = append(dumps, d)
			}
		}
		if err != nil {
			f.Error, f.From = safe.Text(err.Error()), ""
		}
		files = append(files, f)
	}
	return newJobs(dumps, files), nil
}

// Live returns a job without files, for the dumps of ranks that run. The dumps also have groups
// with other ranks, which were not asked for a dump.
func Live(asked []int) *Job {
	j := newJob()
	j.live, j.asked = true, asked
	return j
}

// Add adds the dump of a rank that runs.
func (j *Job) Add(r io.Reader) error {
	d, err := decode(r)
	if err == nil {
		err = j.add(d)
	}
	return err
}

func loadFile(name string) (*dump, error) {
	f, err := safe.Open(name)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	d, err := decode(f)
	if err == nil {
		d.file = name
	}
	return d, err
}

// list returns the files of paths, sorted.
func list(paths []string) (names []string, err error) {
	for _, path := range paths {
		info, err := os.Stat(path)
		if err != nil {
			return nil, fmt.Errorf("analyze: %w", err)
		}
		if !info.IsDir() {
			names = append(names, path)
			continue
		}
		entries, err := os.ReadDir(path)
		if err != nil {
			return nil, fmt.Errorf("analyze: %w", err)
		}
		for _, e := range entries {
			if e.Type()&fs.ModeDir == 0 {
				names = append(names, filepath.Join(path, e.Name()))
			}
		}
	}
	slices.Sort(names)
	names = slices.Compact(names)
	switch {
	case len(names) == 0:
		return nil, errors.New("analyze: the folders have no files: give the files of CHORUS_NCCL_TRACE_FILE or TORCH_FR_DUMP_TEMP_FILE")
	case len(names) > mostFiles:
		return nil, fmt.Errorf("analyze: %d files: want at most %d", len(names), mostFiles)
	}
	return names, nil
}
