package virtual

import (
	"runtime"
	"time"
	"unsafe"

	"github.com/gochorus/chorus/internal/cudadrv"
)

// Shared returns memory that kernels of several devices use at the same time. It is
// to be read and written by atomic operations alone, and is good until Func returns.
// Whether the device may use it is checked, but the uses are not recorded: what
// orders them is what the kernels read there.
func (k *KernelCall) Shared(p cudadrv.DevicePtr, bytes uintptr) []byte {
	if bytes == 0 {
		return nil
	}
	m := k.op.s.dev.m
	m.mu.Lock()
	data, t := k.op.share(p, uint64(bytes))
	m.mu.Unlock()
	if t != nil {
		panic(t)
	}
	return data
}

// share is touch without a record. What is mapped in a reservation must not be
// unmapped meanwhile nevertheless. m.mu is held.
func (o *op) share(p cudadrv.DevicePtr, n uint64) ([]byte, *trouble) {
	b, t := o.resolve(p, n, true)
	if t != nil {
		return nil, t
	}
	offset := uint64(p) - b.addr
	if b.space != nil {
		for _, x := range b.space.within(offset, n) {
			x.use(o.access())
		}
	}
	return o.hold(b, offset, n), nil
}

// SharedOf is KernelCall.Shared for n elements. p must be a multiple of their size.
func SharedOf[T uint32 | uint64](k *KernelCall, p cudadrv.DevicePtr, n int) []T {
	var zero T
	checkAligned[T](k, p)
	return view[T](k.Shared(p, uintptr(n)*unsafe.Sizeof(zero)))
}

// How often Await asks before it sleeps, and how long it does then, at first and at
// most.
const (
	awaitYields  = 200
	awaitFirst   = 10 * time.Microsecond
	awaitLongest = time.Millisecond
)

// Await asks ready again and again, and returns true once that does. It returns false
// when the device has been lost before.
func (k *KernelCall) Await(ready func() bool) bool {
	lost := k.op.s.dev.lost
	pause := awaitFirst
	for n := 0; !ready(); n++ {
		select {
		case <-lost:
			return false
		default:
		}
		if n < awaitYields {
			runtime.Gosched()
			continue
		}
		time.Sleep(pause)
		pause = min(2*pause, awaitLongest)
	}
	return true
}
