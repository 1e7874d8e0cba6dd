package cudacc

import (
	"bufio"
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"slices"
	"sync"

	"github.com/klauspost/compress/zstd"
)

// Arch is the default virtual architecture of sources: Turing, the lowest one
// that all NVRTC versions 12 and 13 support.
const Arch = 75

// A Source is the input of one compilation.
type Source struct {
	Name    string // for messages
	CUDA    string
	Options []string // NVRTC options besides the architecture
	Arch    int      // 0 means Arch
}

// CompilerOptions returns the options for NVRTC.
func (s *Source) CompilerOptions() []string {
	return append([]string{fmt.Sprintf("--gpu-architecture=compute_%d", s.arch()), "--std=c++17"}, s.Options...)
}

func (s *Source) arch() int {
	if s.Arch == 0 {
		return Arch
	}
	return s.Arch
}

// format is part of every digest. Change it when the generator changes: then all
// texts must be generated again.
const format = "chorus ptx 1"

// Digest returns the digest of a source and its options.
func Digest(cuda string, options []string) string {
	h := sha256.New()
	for _, part := range append([]string{format, cuda}, options...) {
		var n [8]byte
		binary.LittleEndian.PutUint64(n[:], uint64(len(part)))
		h.Write(n[:])
		io.WriteString(h, part)
	}
	return hex.EncodeToString(h.Sum(nil))
}

// An Entry is a PTX text with its description.
type Entry struct {
	Digest   string // of the source
	Name     string // without spaces
	Arch     int    // 75 is compute_75
	Compiler string // such as NVRTC-13.0
	Version  string // of PTX, such as 6.3
	Text     []byte
}

// An Archive holds entries. The zero value and nil are empty. Only the headers of
// entries stay in memory uncompressed.
type Archive struct {
	packed []byte
	index  func() ([]Entry, error) // entries without texts
}

// OpenArchive returns the archive written by PackArchive.
func OpenArchive(packed []byte) *Archive {
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
		if _, err := texts.ReadByte(); err != io.EOF { // also checks the checksum
			return errors.Join(errors.New("unexpected data after the last entry"), err)
		}
		return nil
	})
	return entries, err
}

// Find returns the entry with a digest, or nil. It decompresses all data before
// the entry, which takes some milliseconds for each ten megabytes.
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

// An archive consists of a header line, a line for each entry, and the texts. It
// is compressed with a window larger than all texts together, because texts of
// one source are similar.
const (
	layout = "chorus ptx archive 3, %d entries\n"
	header = "%s %s %d %s %s %d\n"
)

const mostBytes = 64 << 20 // limit of an uncompressed archive

// PackArchive returns an archive, the same for the same entries.
func PackArchive(entries []Entry) []byte {
	var all bytes.Buffer
	fmt.Fprintf(&all, layout, len(entries))
	for _, e := range entries {
		fmt.Fprintf(&all, header, e.Digest, e.Name, e.Arch, e.Compiler, e.Version, len(e.Text))
	}
	for _, e := range entries {
		all.Write(e.Text)
	}
	var packed bytes.Buffer
	// The options are valid, and writing to memory does not fail.
	z, _ := zstd.NewWriter(&packed, zstd.WithEncoderLevel(zstd.SpeedBestCompression), zstd.WithWindowSize(mostBytes), zstd.WithEncoderConcurrency(1))
	_, _ = z.Write(all.Bytes())
	_ = z.Close()
	return packed.Bytes()
}

// read calls fn with all entries without their texts, the sizes of the texts, and
// a reader of the texts.
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

// readHeaders returns the entries without their texts, and the sizes of the texts.
func readHeaders(r *bufio.Reader) (entries []Entry, sizes []int, err error) {
	line, err := r.ReadString('\n')
	if err != nil {
		return nil, nil, err
	}
	n, left := 0, mostBytes
	if _, err := fmt.Sscanf(line, layout, &n); err != nil || n < 0 {
		return nil, nil, fmt.Errorf("the archive starts with %q", line)
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
