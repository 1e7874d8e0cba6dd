package memory

import (
	"fmt"
	"path/filepath"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/dl"
	"github.com/gochorus/chorus/internal/gpu"
	"github.com/gochorus/chorus/stream"
)

// OpenPlugin returns an Allocator of a shared library
// (torch.cuda.memory.CUDAPluggableAllocator). The library exports two C functions with
// the given names:
//
//	void *alloc(ssize_t size, int device, cudaStream_t stream);
//	void free(void *ptr, ssize_t size, int device, cudaStream_t stream);
//
// They are called on any thread, several at the same time, with the device's primary
// context bound. On virtual devices there is no context, and C code cannot use the stream.
// If alloc returns NULL, the error is an *OutOfMemoryError. The library stays loaded until
// the process ends. A name without a slash is searched as the system searches for
// libraries.
func OpenPlugin(path, allocName, freeName string) (Allocator, error) {
	const op = "memory: open plug-in"
	if path == "" {
		return nil, fmt.Errorf("%s: no library given", op)
	}
	lib, err := dl.Open(&dl.Spec{Name: filepath.Base(path), Sonames: []string{path}})
	if err != nil {
		return nil, fmt.Errorf("%s: %w", op, err)
	}
	p := &plugin{path: lib.Path()}
	for _, f := range []struct {
		name string
		fn   *uintptr
	}{{allocName, &p.alloc}, {freeName, &p.free}} {
		fn, ok := lib.Symbol(f.name)
		if !ok {
			return nil, fmt.Errorf("%s: %s has no function %q: is it declared extern \"C\"?", op, lib.Path(), f.name)
		}
		*f.fn = fn
	}
	return p, nil
}

type plugin struct {
	path        string
	alloc, free uintptr
}

func (p *plugin) Alloc(s *stream.Stream, bytes int) (uint64, error) {
	if err := checkAlloc(s, bytes); err != nil {
		return 0, err
	}
	var ptr uintptr
	err := p.call(s, func(d *device.Device) {
		f := dl.Get().In(uintptr(bytes), uintptr(d.Ordinal()), s.Handle())
		ptr = f.Call(p.alloc)
		f.Put()
	})
	if err != nil {
		return 0, fmt.Errorf("memory: allocate %d bytes: %w", bytes, err)
	}
	if ptr == 0 {
		return 0, outOfMemory(s.Device(), uintptr(bytes), fmt.Errorf("%s returned NULL: %w", p.path, device.Status(cudadrv.ErrorOutOfMemory)))
	}
	return uint64(ptr), nil
}

func (p *plugin) Free(s *stream.Stream, ptr uint64, bytes int) error {
	if err := checkFree(s); err != nil {
		return err
	}
	err := p.call(s, func(d *device.Device) {
		f := dl.Get().In(uintptr(ptr), uintptr(bytes), uintptr(d.Ordinal()), s.Handle())
		f.Call(p.free)
		f.Put()
	})
	if err != nil {
		return fmt.Errorf("memory: free %d bytes at %#x: %w", bytes, ptr, err)
	}
	return nil
}

// call calls C with the context of the stream's device bound, and with the thread in
// the relaxed capture mode.
func (p *plugin) call(s *stream.Stream, fn func(*device.Device)) error {
	d := s.Device()
	return gpu.DeviceOf(d).Bound(func() error {
		return gpu.DeviceOf(d).Relaxed(func() error {
			fn(d)
			return nil
		})
	})
}
