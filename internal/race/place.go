package race

import (
	"fmt"
	"runtime"
	"strings"
)

// A Place is the call stack of the call that enqueued an operation. It is nil if it is
// unknown. It is resolved only for a report.
type Place struct {
	pcs []uintptr
	n   int
}

// Here returns the place of the caller.
func Here() *Place {
	p := new(Place)
	p.n = runtime.Callers(2, p.room())
	return p
}

// Mark makes p the place of the caller, in the memory that it has.
func (p *Place) Mark() { p.n = runtime.Callers(2, p.room()) }

func (p *Place) room() []uintptr {
	if p.pcs == nil {
		p.pcs = make([]uintptr, 48)
	}
	return p.pcs
}

// String returns the file and the line of the program that called Chorus. If no such function
// is on the stack, because Chorus called the driver on a goroutine, it is the outermost
// function of Chorus.
func (p *Place) String() string {
	if p == nil {
		return ""
	}
	place := ""
	frames := runtime.CallersFrames(p.pcs[:p.n])
	for more := true; more; {
		var f runtime.Frame
		f, more = frames.Next()
		if f.File == "" || strings.HasPrefix(f.Function, "runtime.") {
			continue
		}
		place = fmt.Sprintf("%s:%d", f.File, f.Line)
		if !ofLibrary(f) {
			break
		}
	}
	return place
}

const module = "github.com/gochorus/chorus/"

// ofLibrary reports whether a function belongs to Chorus's packages, without its programs,
// examples and tests, or to the standard library, which calls functions for others.
func ofLibrary(f runtime.Frame) bool {
	if strings.HasSuffix(f.File, "_test.go") {
		return false
	}
	name, ours := strings.CutPrefix(f.Function, module)
	if !ours {
		first, _, _ := strings.Cut(f.Function, "/")
		return strings.HasPrefix(first, "sync.") || strings.HasPrefix(first, "slices.")
	}
	return !strings.HasPrefix(name, "examples/") && !strings.HasPrefix(name, "cmd/")
}
