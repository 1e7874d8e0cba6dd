package ptx

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"slices"
	"sync"

	"github.com/klauspost/compress/zstd"
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
	a.index = sync.OnceValues(func() (entries []Entry, err error) {
		err = a.read(func(list []Entry, _ []int, _ *bufio.Reader) error {
			entries = list
			return nil
		})
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
func (a *Archive) Entries() (entries []Entry, err error) {
	if n, err := a.Len(); err != nil || n == 0 {
		return nil, err
	}
	err = a.read(func(list []Entry, sizes []int, texts *bufio.Reader) error {
		entries = list
		for i, size := range sizes {
			if entries[i].Text, err = textOf(texts, size); err != nil {
				return err
			}
		}
		if _, err := texts.ReadByte(); err != io.EOF { // the checksum is there
			return errors.Join(errors.New("there is more behind the last entry"), err)
		}
		return nil
	})
	return entries, err
}

// Find returns the entry of a digest, or nil. It unpacks all that lies before the entry,
// which takes some milliseconds for each ten megabytes.
func (a *Archive) Find(digest string) (found *Entry, err error) {
	if n, err := a.Len(); err != nil || n == 0 {
		return nil, err
	}
	err = a.read(func(list []Entry, sizes []int, texts *bufio.Reader) error {
		i := slices.IndexFunc(list, func(e Entry) bool { return e.Digest == digest })
		if i < 0 {
			return nil
		}
		for _, size := range sizes[:i] {
			if _, err := texts.Discard(size); err != nil {
				return err
			}
		}
		text, err := textOf(texts, sizes[i])
		found = &list[i]
		found.Text = text
		return err
	})
	return found, err
}

func textOf(r io.Reader, size int) ([]byte, error) {
	text := make([]byte, size)
	_, err := io.ReadFull(r, text)
	return text, err
}

// An archive is a line, one for each entry, and the texts, compressed with a window that
// all of them fit in, since those of one source are mostly alike.
const (
	layout = "chorus ptx archive 3, %d entries\n"
	header = "%s %s %d %s %s %d\n"
)

const mostBytes = 64 << 20 // in an archive, unpacked

// Pack writes an archive. The same entries give the same bytes.
func Pack(entries []Entry) []byte {
	var all bytes.Buffer
	fmt.Fprintf(&all, layout, len(entries))
	for _, e := range entries {
		fmt.Fprintf(&all, header, e.Digest, e.Name, e.Arch, e.Compiler, e.Version, len(e.Text))
	}
	for _, e := range entries {
		all.Write(e.Text)
	}
	var packed bytes.Buffer
	// The options are right, and memory takes all.
	z, _ := zstd.NewWriter(&packed, zstd.WithEncoderLevel(zstd.SpeedBestCompression), zstd.WithWindowSize(mostBytes), zstd.WithEncoderConcurrency(1))
	_, _ = z.Write(all.Bytes())
	_ = z.Close()
	return packed.Bytes()
}

// read calls fn with all entries without their texts, with the sizes of these, and with
// the texts.
func (a *Archive) read(fn func([]Entry, []int, *bufio.Reader) error) error {
	z, err := zstd.NewReader(bytes.NewReader(a.packed), zstd.WithDecoderConcurrency(1), zstd.WithDecoderMaxWindow(mostBytes))
	if err != nil {
		return fmt.Errorf("ptx: read archive: %w", err)
	}
	defer z.Close()
	r := bufio.NewReader(z)
	entries, sizes, err := readHeaders(r)
	if err == nil {
		err = fn(entries, sizes, r)
	}
	if err != nil {
		return fmt.Errorf("ptx: read archive: %w", err)
	}
	return nil
}

// readHeaders returns the entries without their texts, and the sizes of these.
func readHeaders(r *bufio.Reader) (entries []Entry, sizes []int, err error) {
	line, err := r.ReadString('\n')
	if err != nil {
		return nil, nil, err
	}
	n, left := 0, mostBytes
	if _, err := fmt.Sscanf(line, layout, &n); err != nil || n < 0 {
		return nil, nil, fmt.Errorf("it begins with %q", line)
	}
	for len(entries) < n {
		if line, err = r.ReadString('\n'); err != nil {
			return nil, nil, err
		}
		var e Entry
		size := 0
		if _, err := fmt.Sscanf(line, header, &e.Digest, &e.Name, &e.Arch, &e.Compiler, &e.Version, &size); err != nil || size < 0 || size > left {
			return nil, nil, fmt.Errorf("entry %d has the header %q", len(entries), line)
		}
		left -= size
		entries, sizes = append(entries, e), append(sizes, size)
	}
	return entries, sizes, nil
}
