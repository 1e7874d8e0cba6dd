package kernel

import (
	"bytes"
	"debug/elf"
	"encoding/binary"
	"errors"
	"flag"
	"fmt"
	"log/slog"
	"strings"
	"sync"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/kern"
	"github.com/gochorus/chorus/internal/virtual/machine"
)

// limitsOfVirtual returns the limits of the kernels of a source on virtual devices. If NVRTC is
// installed, it compiles the source, and returns the compiler's errors. Otherwise the limits are
// those that the source declares.
func limitsOfVirtual(dev *device.Device, src *Source, defs map[string]definition) (map[string]machine.Limits, error) {
	declared := map[string]machine.Limits{}
	for name, d := range defs {
		declared[name] = d.limits
	}
	if kern.IsResident(src) || kern.IsGoOnly(src) || kern.Archive(src) != nil {
		return declared, nil // of Chorus
	}
	c, err := newCompiler(dev, src)
	if errors.Is(err, errors.ErrUnsupported) {
		sayOnce()
		return declared, src.checkText()
	}
	if err != nil {
		return nil, err
	}
	return c.limits(src, declared)
}

// limits compiles a source and reads the limits of its kernels. If the compiler is too old for the
// architecture, they are those that the source declares.
func (c *compiler) limits(src *Source, declared map[string]machine.Limits) (map[string]machine.Limits, error) {
	image, err := c.binary(src)
	if err != nil {
		return nil, err
	}
	limits, err := cubinLimits(image, c.arch)
	if err != nil {
		return declared, nil // PTX
	}
	for _, d := range src.Kernels {
		if _, found := limits[d.Name]; !found {
			return nil, fmt.Errorf("kernel: find %s in %s: the binary has no kernel of this name: declare it extern \"C\" __global__", d.Name, src.Name)
		}
	}
	return limits, nil
}

var unchecked sync.Once

// sayOnce logs what virtual devices cannot check without NVRTC, in tests, which rely on them.
func sayOnce() {
	if flag.Lookup("test.v") == nil {
		return
	}
	unchecked.Do(func() {
		slog.Info("kernel: virtual devices check kernels by their declarations only: not their registers and local memory, and their C++ code only if g++ compiles it", "cause", "NVRTC is not installed")
	})
}

// Attributes of .nv.info, and the format of those that have a payload of its own size.
const (
	attrMaxThreads = 0x05 // of a block, in x, y and z
	attrFrameSize  = 0x11 // local memory of a thread
	attrRegisters  = 0x2f
	formatSized    = 4
)

// Since sm_90 the shared memory of a kernel that has any begins with 1 KiB for the system, which the
// binary counts and the driver's attribute does not.
const (
	archReserves = 90
	reserved     = 1 << 10
)

// cubinLimits reads the limits of the kernels in a binary for an architecture.
func cubinLimits(image []byte, arch int) (map[string]machine.Limits, error) {
	if len(image) < 64 {
		return nil, errors.New("kernel: read a binary: it is too short")
	}
	image = bytes.Clone(image)
	binary.LittleEndian.PutUint32(image[20:], uint32(elf.EV_CURRENT)) // where binaries have CUDA's version
	f, err := elf.NewFile(bytes.NewReader(image))
	if err != nil {
		return nil, fmt.Errorf("kernel: read a binary: %w", err)
	}
	symbols, err := f.Symbols()
	if err != nil {
		return nil, fmt.Errorf("kernel: read a binary: %w", err)
	}
	limits, constBytes := map[string]machine.Limits{}, 0
	for _, s := range f.Sections {
		if name, ok := strings.CutPrefix(s.Name, ".text."); ok {
			limits[name] = machine.Limits{}
		}
		if s.Name == ".nv.constant3" {
			constBytes = int(s.Size)
		}
	}
	set := func(name string, change func(*machine.Limits)) {
		if l, ok := limits[name]; ok {
			change(&l)
			limits[name] = l
		}
	}
	for name := range limits {
		set(name, func(l *machine.Limits) { l.ConstBytes = constBytes })
	}
	for _, s := range f.Sections {
		if name, ok := strings.CutPrefix(s.Name, ".nv.shared."); ok {
			size := int(s.Size)
			if arch >= archReserves {
				size = max(0, size-reserved)
			}
			set(name, func(l *machine.Limits) { l.SharedBytes = size })
		}
		name, ofKernel := strings.CutPrefix(s.Name, ".nv.info.")
		if s.Name != ".nv.info" && !ofKernel {
			continue
		}
		data, err := s.Data()
		if err != nil {
			return nil, fmt.Errorf("kernel: read %s of a binary: %w", s.Name, err)
		}
		err = readInfo(data, func(attr byte, words []uint32) {
			switch {
			case attr == attrMaxThreads && ofKernel && len(words) >= 3:
				set(name, func(l *machine.Limits) { l.MaxThreads = int(words[0] * words[1] * words[2]) })
			case len(words) < 2 || words[0] < 1 || int(words[0]) > len(symbols):
			case attr == attrRegisters:
				set(symbols[words[0]-1].Name, func(l *machine.Limits) { l.Registers = int(words[1]) })
			case attr == attrFrameSize:
				set(symbols[words[0]-1].Name, func(l *machine.Limits) { l.LocalBytes = int(words[1]) })
			}
		})
		if err != nil {
			return nil, fmt.Errorf("kernel: read %s of a binary: %w", s.Name, err)
		}
	}
	return limits, nil
}

// readInfo calls f with each attribute of a section .nv.info and the words of its payload.
func readInfo(data []byte, f func(attr byte, words []uint32)) error {
	for len(data) >= 4 {
		format, attr, size := data[0], data[1], int(binary.LittleEndian.Uint16(data[2:]))
		data = data[4:]
		if format != formatSized {
			continue // the value is in the size
		}
		if size > len(data) {
			return fmt.Errorf("attribute %#x has %d bytes: the section ends after %d", attr, size, len(data))
		}
		words := make([]uint32, size/4)
		for i := range words {
			words[i] = binary.LittleEndian.Uint32(data[4*i:])
		}
		f(attr, words)
		data = data[size:]
	}
	return nil
}
