package ptx

import (
	"bufio"
	"bytes"
	"compress/gzip"
	"fmt"
	"io"
	"slices"
	"sync"
)

// An Archive holds entries. The zero value and nil are empty. Nothing of it is kept
// unpacked but what entries are called.
type Archive struct {
	packed []byte
	index  func() ([]Entry, error) // without their texts
}

// Open returns the archive that Pack has written.
func Open(packed []byte) *Archive {
	a := &Archive{packed: packed}
	a.index = sync.OnceValues(func() ([]Entry, error) {
		entries, _, err := a.read(0)
		return entries, err
	})
	return a
}

// Len returns the number of entries.
func (a *Archive) Len() (int, error) {
	if a == nil || len(a.packed) == 0 {
		return 0, nil
	}
	entries, err := a.index()
	return len(entries), err
}

// Entries returns all entries in their order.
func (a *Archive) Entries() ([]Entry, error) {
	n, err := a.Len()
	if err != nil || n == 0 {
		return nil, err
	}
	entries, texts, err := a.read(n)
	for i := range texts {
		entries[i].Text = texts[i]
	}
	return entries, err
}

// Find returns the entry of a digest, or nil. It unpacks all that lies before the entry,
// which takes some milliseconds for each ten megabytes.
func (a *Archive) Find(digest string) (*Entry, error) {
	if n, err := a.Len(); err != nil || n == 0 {
		return nil, err
	}
	entries, _ := a.index()
	i := slices.IndexFunc(entries, func(e Entry) bool { return e.Digest == digest })
	if i < 0 {
		return nil, nil
	}
	_, texts, err := a.read(i + 1)
	if err != nil {
		return nil, err
	}
	e := entries[i]
	e.Text = bytes.Clone(texts[i]) // of it alone, not of all
	return &e, nil
}

// An archive is two lines, a line for each entry, and the texts by their repeats, all
// of which gzip makes smaller.
const (
	layout = "chorus ptx archive 2\n"
	counts = "%d %d %d\n" // entries, bytes of repeats, and fresh ones
	header = "%s %s %d %s %s %d\n"
)

const mostBytes = 64 << 20 // in an archive, unpacked

// Pack writes an archive. The same entries give the same bytes.
func Pack(entries []Entry) []byte {
	var texts []byte
	for _, e := range entries {
		texts = append(texts, e.Text...)
	}
	repeats, fresh := split(texts)
	var b bytes.Buffer
	z, _ := gzip.NewWriterLevel(&b, gzip.BestCompression) // the level is one that there is
	fmt.Fprintf(z, layout+counts, len(entries), len(repeats), len(fresh))
	for _, e := range entries {
		fmt.Fprintf(z, header, e.Digest, e.Name, e.Arch, e.Compiler, e.Version, len(e.Text))
	}
	_, _ = z.Write(append(repeats, fresh...)) // to memory
	_ = z.Close()
	return b.Bytes()
}

// read returns all entries without their texts, and the texts of the first n.
func (a *Archive) read(n int) ([]Entry, [][]byte, error) {
	fail := func(err error) ([]Entry, [][]byte, error) { return nil, nil, fmt.Errorf("ptx: read archive: %w", err) }
	z, err := gzip.NewReader(bytes.NewReader(a.packed))
	if err != nil {
		return fail(err)
	}
	r := bufio.NewReader(z)
	if line, err := r.ReadString('\n'); err != nil || line != layout {
		return fail(fmt.Errorf("it begins with %q, %v: want %q", line, err, layout))
	}
	var all, repeats, fresh int
	if _, err := fmt.Fscanf(r, counts, &all, &repeats, &fresh); err != nil || min(all, repeats, fresh) < 0 || max(all, repeats, fresh) > mostBytes {
		return fail(fmt.Errorf("it has %d entries, %d and %d bytes, %v", all, repeats, fresh, err))
	}
	entries, ends, err := readHeaders(r, all)
	if err != nil || n == 0 {
		if err != nil {
			return fail(err)
		}
		return entries, nil, nil
	}
	packed, err := io.ReadAll(io.LimitReader(r, mostBytes)) // to the end, where gzip's checksum is
	if err != nil {
		return fail(err)
	}
	if len(packed) != repeats+fresh {
		return fail(fmt.Errorf("there are %d bytes: want %d", len(packed), repeats+fresh))
	}
	whole, err := join(packed[:repeats], packed[repeats:], ends[n-1])
	if err != nil {
		return fail(err)
	}
	texts, at := make([][]byte, n), 0
	for i := range texts {
		texts[i], at = whole[at:ends[i]:ends[i]], ends[i]
	}
	return entries, texts, nil
}

// readHeaders returns the entries without their texts, and where each of these ends.
func readHeaders(r *bufio.Reader, n int) (entries []Entry, ends []int, err error) {
	end := 0
	for len(entries) < n {
		line, err := r.ReadString('\n')
		if err != nil {
			return nil, nil, err
		}
		var e Entry
		size := 0
		if _, err := fmt.Sscanf(line, header, &e.Digest, &e.Name, &e.Arch, &e.Compiler, &e.Version, &size); err != nil || size < 0 || size > mostBytes-end {
			return nil, nil, fmt.Errorf("entry %d has the header %q", len(entries), line)
		}
		end += size
		entries, ends = append(entries, e), append(ends, end)
	}
	return entries, ends, nil
}
