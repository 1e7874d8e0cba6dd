//go:build !amd64

package dl

import "github.com/ebitengine/purego"

// cross goes to C. The calling goroutine is locked to its thread where the first
// function prepares it for the second.
func (f *Frame) cross() {
	if f.before != 0 {
		r, _, _ := purego.SyscallN(f.before, f.subject)
		if int32(r) != 0 {
			f.result = r
			return
		}
	}
	f.result, _, _ = purego.SyscallN(f.fn, f.words[:f.nwords]...)
}

// pass goes to C with nothing but the arguments.
func (p *passage) pass() int32 {
	r, _, _ := purego.SyscallN(p.fn, p.words[:]...)
	return int32(r)
}
