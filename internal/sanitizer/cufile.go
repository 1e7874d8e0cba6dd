package sanitizer

import (
	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/cufileapi"
	"github.com/gochorus/chorus/internal/race"
)

// cufile is a decorated cuFile. The host must have waited for earlier uses of the memory of a
// synchronous transfer.
type cufile struct {
	cufileapi.API
	t *tracker
}

// onHost records an operation of the host, which ends when call returns.
func (f cufile) onHost(name string, use cudadrv.Use, call func()) {
	where := race.Here()
	f.t.mu.Lock()
	q := &queue{handle: race.Host, now: f.t.slots.Take()}
	delete(f.t.contexts, q.now.Slot)
	f.t.perform(&node{name: name, where: where, uses: []cudadrv.Use{use}}, []*queue{q})
	f.t.unlock()
	call()
	f.t.mu.Lock()
	defer f.t.mu.Unlock()
	f.t.host = f.t.host.JoinStamp(q.now)
	f.t.slots.Put(q.now)
}

func (f cufile) Read(h cufileapi.Handle, base cudadrv.DevicePtr, bytes uintptr, fileOffset, devOffset int64) (n int64, err error) {
	f.onHost("cuFileRead", write(base+cudadrv.DevicePtr(devOffset), bytes), func() { n, err = f.API.Read(h, base, bytes, fileOffset, devOffset) })
	return n, err
}

func (f cufile) Write(h cufileapi.Handle, base cudadrv.DevicePtr, bytes uintptr, fileOffset, devOffset int64) (n int64, err error) {
	f.onHost("cuFileWrite", read(base+cudadrv.DevicePtr(devOffset), bytes), func() { n, err = f.API.Write(h, base, bytes, fileOffset, devOffset) })
	return n, err
}
