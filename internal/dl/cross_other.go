//go:build !amd64 || nolinkname

package dl

import "github.com/ebitengine/purego"

// cross calls C. If a first function prepares the thread for the second one, the caller
// has locked the goroutine to its thread.
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

// pass calls C with the arguments only.
func (p *passage) pass() int32 {
	r, _, _ := purego.SyscallN(p.fn, p.words[:]...)
	return int32(r)
}
