// Package ptx stores the Chorus kernels as PTX, the driver's portable assembly, so that
// no compiler is needed at run time. An archive maps digests of sources to PTX texts,
// and each text has the lowest PTX version that its content permits.
package ptx

import (
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"io"
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
