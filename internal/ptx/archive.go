// Package ptx keeps Chorus's own kernels as PTX, the driver's portable assembly,
// so that they need no compiler where they run: an archive of texts by what they
// were made of, and the lowest version of PTX that a text can be given to.
package ptx

import (
	"bufio"
	"bytes"
	"compress/gzip"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"io"
	"sync"
)

// Arch is the virtual architecture that sources are compiled for unless they
// need more: the lowest that every NVRTC from 12 to 13 offers, Turing's.
const Arch = 75

// A Source is what one text is made of.
type Source struct {
	Name    string // for people
	CUDA    string
	Options []string // for NVRTC, beside the architecture
	Arch    int      // 0 means Arch
}

// CompilerOptions are the options that NVRTC gets.
func (s *Source) CompilerOptions() []string {
	return append([]string{fmt.Sprintf("--gpu-architecture=compute_%d", s.arch()), "--std=c++17"}, s.Options...)
}

func (s *Source) arch() int {
	if s.Arch == 0 {
		return Arch
	}
	return s.Arch
}

// format is part of every digest: a change of what the generator does changes
// it, and then all texts have to be made anew.
const format = "chorus ptx 1"

// Digest names what a text is made of.
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

// An Entry is one text with what is known of it.
type Entry struct {
	Digest   string // of the source
	Name     string // without spaces
	Arch     int    // 75 is compute_75
	Compiler string // such as NVRTC-13.0
	Version  string // of PTX, such as 6.3
	Text     []byte
}

// An Archive holds entries. The zero value and nil are empty.
type Archive struct {
	packed  []byte
	once    sync.Once
	entries []Entry
	err     error
}

// Open returns the archive that Pack has written. It is unpacked on first use.
func Open(packed []byte) *Archive { return &Archive{packed: packed} }

// Entries returns all entries in their order.
func (a *Archive) Entries() ([]Entry, error) {
	if a == nil || len(a.packed) == 0 {
		return nil, nil
	}
	a.once.Do(func() {
		if a.entries, a.err = unpack(a.packed); a.err != nil {
			a.err = fmt.Errorf("ptx: read archive: %w", a.err)
		}
	})
	return a.entries, a.err
}

// Find returns the entry of a digest, or nil.
func (a *Archive) Find(digest string) (*Entry, error) {
	entries, err := a.Entries()
	for i := range entries {
		if entries[i].Digest == digest {
			return &entries[i], nil
		}
	}
	return nil, err
}

// header is the line before each text.
const header = "%s %s %d %s %s %d\n"

// Pack writes an archive. The same entries give the same bytes.
func Pack(entries []Entry) []byte {
	var b bytes.Buffer
	z, _ := gzip.NewWriterLevel(&b, gzip.BestCompression) // the level is one that there is
	fmt.Fprintln(z, format)
	for _, e := range entries {
		fmt.Fprintf(z, header, e.Digest, e.Name, e.Arch, e.Compiler, e.Version, len(e.Text))
		_, _ = z.Write(e.Text) // to memory
	}
	_ = z.Close()
	return b.Bytes()
}

func unpack(packed []byte) ([]Entry, error) {
	z, err := gzip.NewReader(bytes.NewReader(packed))
	if err != nil {
		return nil, err
	}
	r := bufio.NewReader(z)
	if line, err := r.ReadString('\n'); err != nil || line != format+"\n" {
		return nil, fmt.Errorf("it begins with %q, %v: want %q", line, err, format)
	}
	var entries []Entry
	for {
		line, err := r.ReadString('\n')
		if err == io.EOF && line == "" {
			return entries, nil
		}
		if err != nil {
			return nil, err
		}
		var e Entry
		n := 0
		if _, err := fmt.Sscanf(line, header, &e.Digest, &e.Name, &e.Arch, &e.Compiler, &e.Version, &n); err != nil || n < 0 || n > 64<<20 {
			return nil, fmt.Errorf("entry %d has the header %q", len(entries), line)
		}
		e.Text = make([]byte, n)
		if _, err := io.ReadFull(r, e.Text); err != nil {
			return nil, fmt.Errorf("entry %s: %w", e.Name, err)
		}
		entries = append(entries, e)
	}
}
