package kernel

import (
	"fmt"
	"strings"
	"unsafe"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/cudacc"
	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/handle"
	"github.com/gochorus/chorus/internal/inside"
	"github.com/gochorus/chorus/internal/virtual/machine"
	"github.com/gochorus/chorus/memory"
)

// A Call is one launch of a kernel on a virtual device, the argument of the kernel's Go
// function.
type Call struct {
	call
	spans []span // the memory that arguments refer to
}

type call = handle.Ref[inside.Call]

// Grid returns the grid of the launch.
func (c *Call) Grid() Grid {
	blocks, threads, shared := inside.CallOf(c).Shape()
	return Grid{Blocks: blocks, Threads: threads, SharedBytes: shared}
}

// Address returns argument i, a Pointer, as a number, which is 0 for a null
// pointer.
func (c *Call) Address(i int) uint64 { return uint64(inside.CallOf(c).Ptr(i)) }

// Bytes returns argument i, a Struct, as memory that must not be written.
func (c *Call) Bytes(i int) []byte { return inside.CallOf(c).Struct(i) }

// Get returns argument i, a number, as a T: the Go type of the parameter, such
// as int32 for I32.
func Get[T memory.Element](c *Call, i int) (v T) {
	bits := inside.CallOf(c).Bits(i, scalarParam[T]().virtual())
	return *(*T)(unsafe.Pointer(&bits)) // little-endian: a narrower value is the first bytes
}

// Read returns n elements at the pointer that is argument i, which the function
// must not write. Request only elements that the kernel reads: others may be
// written by another kernel at the same time.
func Read[T memory.Element](c *Call, i, n int) []T { return ReadAddress[T](c, c.Address(i), n) }

// Update returns n elements at the pointer that is argument i, which the function may read
// and write. If the launch has passed a slice, the elements must be in it, and the source must not declare
// a pointer to const.
func Update[T memory.Element](c *Call, i, n int) []T { return UpdateAddress[T](c, c.Address(i), n) }

// ReadAddress is Read at an address: of a struct, or behind an Address.
func ReadAddress[T memory.Element](c *Call, p uint64, n int) []T {
	return machine.ReadOf[T](inside.CallOf(c), cudadrv.DevicePtr(p), n)
}

// UpdateAddress is Update at an address.
func UpdateAddress[T memory.Element](c *Call, p uint64, n int) []T {
	c.checkWrite(p, n*int(unsafe.Sizeof(*new(T))))
	return machine.WriteOf[T](inside.CallOf(c), cudadrv.DevicePtr(p), n)
}

// accessesOf returns how a kernel uses the memory at each parameter, for the sanitizer: r for
// reading, w for writing, - for neither. A pointer that the parser does not understand counts as
// a read, the weaker use, so that the sanitizer reports only conflicts that exist.
func accessesOf(src *Source, d *Def, said []declared) string {
	if given := inside.Accesses(src, d.Name); given != "" {
		return given
	}
	accesses := []byte(strings.Repeat("-", len(d.Params)))
	for i, p := range d.Params {
		switch {
		case p != Pointer:
		case said == nil || said[i].constant() || !said[i].pointer:
			accesses[i] = 'r'
		default:
			accesses[i] = 'w'
		}
	}
	return string(accesses)
}

// constant reports whether the declaration is of a pointer to constants: const T*.
func (p *declared) constant() bool {
	before, _, _ := strings.Cut(p.text, "*")
	for _, word := range words.FindAllString(before, -1) {
		if word == "const" {
			return true
		}
	}
	return false
}

// usesOf returns the function that lists the memory of a launch. The sanitizer calls it with
// the params of the launch, which are the ptrs of a frame.
func usesOf(accesses string) func(params unsafe.Pointer) []cudadrv.Use {
	return func(params unsafe.Pointer) (uses []cudadrv.Use) {
		f := (*frame)(params)
		for i, a := range accesses {
			if a != '-' && f.bytes[i] > 0 {
				uses = append(uses, cudadrv.Use{Ptr: cudadrv.DevicePtr(f.vals[i]), Bytes: f.bytes[i], Write: a == 'w'})
			}
		}
		return uses
	}
}

// ArchList returns the architectures of the Chorus kernels, as torch.cuda.get_arch_list
// does for torch's. They are PTX, which the driver compiles for every GPU with that
// compute capability or a later one.
func ArchList() []string { return []string{fmt.Sprintf("compute_%d", cudacc.Arch)} }

// GencodeFlags returns ArchList as flags of nvcc, as
// torch.cuda.get_gencode_flags does.
func GencodeFlags() string {
	return fmt.Sprintf("-gencode compute=compute_%[1]d,code=compute_%[1]d", cudacc.Arch)
}

// embedded returns the source's PTX, or nil without an error while the archive
// is empty, so that NVRTC compiles the source.
func embedded(dev *device.Device, src *Source) ([]byte, error) {
	archive := inside.Archive(src)
	if n, err := archive.Len(); err != nil || n == 0 {
		return nil, err
	}
	e, err := archive.Find(cudacc.Digest(src.CUDA, src.Options))
	if err != nil {
		return nil, err
	}
	if e == nil {
		return nil, fmt.Errorf("kernel: load %s: there is no PTX for this source with the options %q: run make ptx", src.Name, src.Options)
	}
	if err := dev.Require(device.Feature{Name: "kernel: load " + src.Name, Major: e.Arch / 10, Minor: e.Arch % 10}); err != nil {
		return nil, err
	}
	return e.Text, nil
}
