package kernel

import (
	"errors"
	"fmt"
	"slices"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/handle"
	"github.com/gochorus/chorus/internal/ptx"
	"github.com/gochorus/chorus/internal/virtual"
)

// A Source is CUDA C++ with one or more kernels.
type Source struct {
	Name    string   // shown in compiler messages
	CUDA    string   // the kernels are extern "C" __global__ void
	Options []string // for NVRTC, such as --use_fast_math
	Kernels []Def
	PTX     *ptx.Archive // has the source compiled; nil but for Chorus's own packages
}

// A Def describes one kernel of a Source.
type Def struct {
	Name   string
	Params []Param
	Go     func(*Call) // stands in on virtual devices; nil where none is needed
}

// A Module is a compiled Source on one device.
type Module struct {
	owner   handle.Owner
	dev     *device.Device
	h       cudadrv.Module
	limits  limits
	kernels map[string]*Kernel
}

// Compile compiles the source for dev and loads it. It takes some tenths of a
// second on CUDA for the first process that compiles it; the binary is then kept
// in a folder, CHORUS_KERNEL_CACHE, until the source, a header, the options or
// the compiler change. A mistake in the source is a *CompileError with the
// compiler's messages.
func Compile(dev *device.Device, src *Source) (*Module, error) {
	m, err := open(dev, src)
	if err == nil {
		handle.Init(m, &m.owner, handle.About{Kind: "kernel module", On: dev})
	}
	return m, err
}

// Resident is Compile of a module that belongs to its device for as long as that
// lives, as the device's context does: nobody closes it, and it is no leak. For
// Chorus's own packages.
func Resident(dev *device.Device, src *Source) (*Module, error) {
	m, err := open(dev, src)
	if err == nil {
		handle.InitForever(&m.owner)
	}
	return m, err
}

// open compiles and loads a module whose owner is not armed yet.
func open(dev *device.Device, src *Source) (*Module, error) {
	if src == nil {
		return nil, errors.New("kernel: compile: no source given")
	}
	if dev == nil {
		return nil, fmt.Errorf("kernel: compile %s: no device given", src.Name)
	}
	if err := src.check(); err != nil {
		return nil, err
	}
	said := declarations(src.CUDA)
	image, err := compile(dev, src)
	if err != nil {
		return nil, err
	}
	m := &Module{dev: dev, kernels: map[string]*Kernel{}}
	if m.limits, err = limitsOf(dev); err != nil {
		return nil, fmt.Errorf("kernel: load %s: %w", src.Name, err)
	}
	// Relaxed: a captured function may be the first to want a kernel.
	err = dev.DoRelaxed("cuModuleLoadData", func(drv cudadrv.Driver) (r cudadrv.Result) {
		m.h, r = drv.ModuleLoadData(image)
		return r
	})
	if err != nil {
		return nil, fmt.Errorf("kernel: load %s: %w", src.Name, err)
	}
	for _, d := range src.Kernels {
		k := &Kernel{module: m, name: d.Name, params: slices.Clone(d.Params), source: said[d.Name]}
		err := dev.DoRelaxed("cuModuleGetFunction", func(drv cudadrv.Driver) (r cudadrv.Result) {
			k.h, r = drv.ModuleGetFunction(m.h, d.Name)
			return r
		})
		if err == nil {
			err = k.load()
		}
		if err != nil {
			_ = m.unload()
			return nil, fmt.Errorf("kernel: find %s in %s: %w", d.Name, src.Name, err)
		}
		m.kernels[d.Name] = k
	}
	return m, nil
}

// check finds mistakes in the description of the kernels.
func (src *Source) check() error {
	seen, said := map[string]bool{}, declarations(src.CUDA)
	for _, d := range src.Kernels {
		switch {
		case d.Name == "" || seen[d.Name]:
			return fmt.Errorf("kernel: compile %s: a kernel has no name, or that of another: %q", src.Name, d.Name)
		case len(d.Params) > maxArgs:
			return fmt.Errorf("kernel: compile %s: %s has %d parameters: at most %d", src.Name, d.Name, len(d.Params), maxArgs)
		}
		for i, p := range d.Params {
			if !p.known() {
				return fmt.Errorf("kernel: compile %s: parameter %d of %s has no type: %v", src.Name, i, d.Name, p)
			}
		}
		if n := virtual.ParamBytes(d.stood()); n > virtual.MaxParamBytes {
			return fmt.Errorf("kernel: compile %s: the parameters of %s take %d bytes: at most %d", src.Name, d.Name, n, virtual.MaxParamBytes)
		}
		if err := d.compare(said); err != nil {
			return fmt.Errorf("kernel: compile %s: %w", src.Name, err)
		}
		seen[d.Name] = true
	}
	return nil
}

// Kernel returns a kernel by its name.
func (m *Module) Kernel(name string) (*Kernel, error) {
	if m == nil {
		return nil, fmt.Errorf("kernel: find %s: no module given", name)
	}
	k, ok := m.kernels[name]
	if !ok {
		return nil, fmt.Errorf("kernel: the module has no kernel %q", name)
	}
	return k, nil
}

// Close unloads the module. Launches must have completed. It is idempotent.
func (m *Module) Close() error {
	if m == nil || !m.owner.Close() {
		return nil
	}
	return m.unload()
}

func (m *Module) unload() error {
	return m.dev.DoRelaxed("cuModuleUnload", func(drv cudadrv.Driver) cudadrv.Result { return drv.ModuleUnload(m.h) })
}

// compile makes the image that the device's driver loads.
func compile(dev *device.Device, src *Source) ([]byte, error) {
	if m := dev.System().Machine(); m != nil {
		return standIns(m, src)
	}
	if image, err := embedded(dev, src); image != nil || err != nil {
		return image, err
	}
	c, err := newCompiler(dev, src)
	if err != nil {
		return nil, err
	}
	return c.binary(src)
}

// standIns makes the image that virtual devices load from the Go functions.
func standIns(m *virtual.Machine, src *Source) ([]byte, error) {
	var ks []virtual.Kernel
	for _, d := range src.Kernels {
		if d.Go == nil {
			return nil, fmt.Errorf("kernel: %s in %s has no Go function to stand in on virtual devices", d.Name, src.Name)
		}
		ks = append(ks, virtual.Kernel{Name: d.Name, Params: d.stood(), Func: func(k *virtual.KernelCall) { d.Go(&Call{k}) }})
	}
	return m.ModuleImage(ks), nil
}

// stood are the parameters as virtual devices know them.
func (d *Def) stood() []virtual.Param {
	ps := make([]virtual.Param, len(d.Params))
	for i, p := range d.Params {
		ps[i] = virtual.Param(p)
	}
	return ps
}
