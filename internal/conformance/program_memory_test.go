package conformance

import (
	"syscall"
	"unsafe"

	"github.com/gochorus/chorus/memory"
)

var memoryPrograms = []program{
	{name: "copy-overlapping", area: "memory", devices: 1, gpu: fails, text: "overlaps the source", run: func(r *run) error {
		s, err := r.stream(0)
		if err != nil {
			return err
		}
		x, err := floats(s, 1<<22)
		if err != nil {
			return err
		}
		if err := memory.Copy(s, x.Slice(1000, x.Len()), x.Slice(0, x.Len()-1000)); err != nil {
			return err
		}
		return check(s, x.Slice(1000, x.Len()), func(i int) float32 { return float32(i) })
	}},
	{name: "copy-to-itself", area: "memory", devices: 1, gpu: succeeds, run: func(r *run) error {
		s, err := r.stream(0)
		if err != nil {
			return err
		}
		x, err := floats(s, 1000)
		if err != nil {
			return err
		}
		if err := memory.Copy(s, x, x); err != nil {
			return err
		}
		return check(s, x, func(i int) float32 { return float32(i) })
	}},
	{name: "pin-read-only-mapping", area: "memory", devices: 1, gpu: fails, text: "CUDA_ERROR_INVALID_VALUE",
		run: pinMapping(syscall.PROT_READ, syscall.MAP_PRIVATE|syscall.MAP_ANON, 0, 8192)},
	{name: "pin-read-only-shared-mapping", area: "memory", devices: 1, gpu: fails, text: "CUDA_ERROR_INVALID_VALUE",
		run: pinMapping(syscall.PROT_READ, syscall.MAP_SHARED|syscall.MAP_ANON, 0, 8192)},
	{name: "pin-shared-mapping", area: "memory", devices: 1, gpu: succeeds,
		run: pinMapping(syscall.PROT_READ|syscall.PROT_WRITE, syscall.MAP_SHARED|syscall.MAP_ANON, 0, 8192)},
	{name: "pin-two-parts-of-a-page", area: "memory", devices: 1, gpu: succeeds,
		run: pinMapping(syscall.PROT_READ|syscall.PROT_WRITE, syscall.MAP_PRIVATE|syscall.MAP_ANON, 0, 1000, 1000, 1000)},
	{name: "pin-unmapped-memory", area: "memory", devices: 1, gpu: fails, text: "CUDA_ERROR_INVALID_VALUE", run: func(r *run) error {
		mem, err := syscall.Mmap(-1, 0, 8192, syscall.PROT_READ|syscall.PROT_WRITE, syscall.MAP_PRIVATE|syscall.MAP_ANON)
		if err != nil {
			return err
		}
		if err := syscall.Munmap(mem); err != nil {
			return err
		}
		_, err = memory.PinSlice(r.devs[0], unsafe.Slice(unsafe.SliceData(mem), len(mem)))
		return err
	}},
}

// pinMapping pins parts of a mapping, each given by its offset and its length.
func pinMapping(prot, flags int, parts ...int) func(*run) error {
	return func(r *run) error {
		mem, err := syscall.Mmap(-1, 0, 8192, prot, flags)
		if err != nil {
			return err
		}
		for i := 0; i < len(parts); i += 2 {
			if _, err := memory.PinSlice(r.devs[0], mem[parts[i]:parts[i]+parts[i+1]]); err != nil {
				return err
			}
		}
		return nil
	}
}
