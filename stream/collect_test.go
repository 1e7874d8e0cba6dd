package stream_test

import "runtime"

// A canary tells when it was collected. It is too large to share its memory with
// other small objects, which would keep it.
type canary struct {
	songs int
	_     [64]byte
}

func newCanary(freed chan struct{}) *canary {
	c := new(canary)
	runtime.AddCleanup(c, func(ch chan struct{}) { close(ch) }, freed)
	return c
}

func (c *canary) sing() { c.songs++ }

func collected(freed chan struct{}) bool {
	runtime.GC()
	select {
	case <-freed:
		return true
	default:
		return false
	}
}
