package machine

import (
	"runtime"
	"time"
	"unsafe"

	"github.com/gochorus/chorus/internal/cudadrv"
)

// Shared returns memory that kernels of several devices use at the same time,
// valid until Func returns. Access it with atomic operations only. Shared checks
// that the device may use the memory, but does not record the use, because the
// kernels synchronize through its content.
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

// share is touch without a record of the use. Memory mapped in a reservation must
// still not be unmapped during the call. m.mu is held.
func (o *Op) share(p cudadrv.DevicePtr, n uint64) ([]byte, *Trouble) {
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

// SharedOf is KernelCall.Shared for n elements. p must be aligned to their size.
func SharedOf[T uint32 | uint64](k *KernelCall, p cudadrv.DevicePtr, n int) []T {
	var zero T
	checkAligned[T](k, p)
	return View[T](k.Shared(p, uintptr(n)*unsafe.Sizeof(zero)))
}

// Await polls awaitYields times and then sleeps between polls, first for
// awaitFirst and at most for awaitLongest.
const (
	awaitYields  = 200
	awaitFirst   = 10 * time.Microsecond
	awaitLongest = time.Millisecond
)

// blocked records what the kernel waits for.
func (k *KernelCall) blocked(on string) {
	m := k.op.s.dev.m
	m.mu.Lock()
	defer m.mu.Unlock()
	k.op.Block(on)
}

// Await polls ready and returns true once ready does. It returns false if the
// device is lost.
func (k *KernelCall) Await(ready func() bool) bool {
	lost := k.op.s.dev.lost
	pause := awaitFirst
	n := 0
	for ; !ready(); n++ {
		select {
		case <-lost:
			return false
		default:
		}
		if n < awaitYields {
			runtime.Gosched()
			continue
		}
		if n == awaitYields {
			k.blocked("memory that another kernel writes")
		}
		time.Sleep(pause)
		pause = min(2*pause, awaitLongest)
	}
	if n > awaitYields {
		k.blocked("")
	}
	return true
}
