// Package ptx keeps Chorus's own kernels as PTX, the driver's portable assembly,
// so that they need no compiler where they run: an archive of texts by what they
// were made of, and the lowest version of PTX that a text can be given to.
package ptx

import (
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"io"
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
