package kernel

import (
	"errors"
	"fmt"
	"slices"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/gpu"
	"github.com/gochorus/chorus/internal/handle"
	"github.com/gochorus/chorus/internal/kern"
	"github.com/gochorus/chorus/internal/virtual/machine"
)

// A Source is CUDA C++ with one or more kernels.
type Source struct {
	Name    string   // shown in compiler messages
	CUDA    string   // the kernels are extern "C" __global__ void
	Options []string // for NVRTC, such as --use_fast_math
	Kernels []Def
	//lint:ignore U1000 internal/kern finds the field by the method that it promotes
	sourceOption
}

//lint:ignore U1000 the field above is of this type
type sourceOption = kern.SourceOption

// A Def describes one kernel of a Source.
type Def struct {
	Name   string
	Params []Param
	Go     func(*Call) // implements the kernel on virtual devices; nil if not needed

	typed *typed // of Define; nil otherwise
}

// A Module is a compiled Source on one device.
type Module struct {
	owner   handle.Owner
	dev     *device.Device
	h       cudadrv.Module
	limits  limits
	kernels map[string]*Kernel
	typed   []*typed // the functions that launch kernels of the module
	shadow  *shadow  // nil unless launches on virtual devices are compared
}

// Compile compiles the source for dev and loads it. The first compilation takes some
// tenths of a second on CUDA. The binary is then cached in the directory
// CHORUS_KERNEL_CACHE until the source, a header, the options or the compiler change. An
// error in the source is a *CompileError with the compiler's messages.
//
// The driver may wait for all work of dev when it loads code. So compile sources at the start:
// Compile hangs if the device's work waits for something that the program does only afterwards, such
// as the collective of another rank.
//
// On virtual devices Compile checks the source like NVRTC, if that is installed; otherwise it
// checks what it can read without a compiler: names, parameters, options and limits. In tests
// virtual devices also run the source on the host (CHORUS_VIRTUAL_KERNELS).
func Compile(dev *device.Device, src *Source) (*Module, error) {
	m, err := open(dev, src)
	if err == nil {
		m.bind(src)
	}
	switch {
	case err != nil:
	case kern.IsResident(src):
		handle.InitForever(&m.owner)
	default:
		handle.Init(m, &m.owner, handle.About{Kind: "kernel module", On: dev})
	}
	return m, err
}

// open compiles and loads a module without leak reporting.
func open(dev *device.Device, src *Source) (*Module, error) {
	if src == nil {
		return nil, errors.New("kernel: compile: no source given")
	}
	if dev == nil {
		return nil, fmt.Errorf("kernel: compile %s: no device given", src.Name)
	}
	said := declarations(src.CUDA)
	if err := src.check(said); err != nil {
		return nil, err
	}
	defs := definitions(src.CUDA)
	if err := src.checkNames(defs); err != nil {
		return nil, err
	}
	m := &Module{dev: dev, kernels: map[string]*Kernel{}}
	if gpu.DeviceOf(dev).System().Machine != nil {
		var err error
		if m.shadow, err = openShadow(src, said); err != nil {
			return nil, err
		}
	}
	image, err := m.compile(src, said, defs)
	if err != nil {
		return nil, errors.Join(err, m.shadow.close())
	}
	if m.limits, err = limitsOf(dev); err != nil {
		_ = m.shadow.close()
		return nil, fmt.Errorf("kernel: load %s: %w", src.Name, err)
	}
	// Relaxed, because a captured function may be the first user of the kernel.
	err = gpu.DeviceOf(dev).DoInTime(func(drv cudadrv.Driver) (r cudadrv.Result) {
		m.h, r = drv.ModuleLoadData(image)
		return r
	})
	if err != nil {
		_ = m.shadow.close()
		return nil, fmt.Errorf("kernel: load %s: %w", src.Name, err)
	}
	for _, d := range src.Kernels {
		if m.kernels[d.Name], err = m.find(&d, said[d.Name], accessesOf(src, &d, said[d.Name])); err != nil {
			_ = m.unload()
			return nil, fmt.Errorf("kernel: find %s in %s: %w", d.Name, src.Name, err)
		}
	}
	return m, nil
}

// bind lets each Func of the source launch the kernel of this module.
func (m *Module) bind(src *Source) {
	for _, d := range src.Kernels {
		if d.typed != nil {
			d.typed.add(m.kernels[d.Name])
			m.typed = append(m.typed, d.typed)
		}
	}
}

// find finds a kernel in the loaded binary.
func (m *Module) find(d *Def, source []declared, accesses string) (*Kernel, error) {
	k := &Kernel{module: m, name: d.Name, params: slices.Clone(d.Params), source: source}
	k.typed = gpu.DeviceOf(m.dev).System().Machine != nil && d.hasLengths()
	err := gpu.DeviceOf(m.dev).DoRelaxed(func(drv cudadrv.Driver) (r cudadrv.Result) {
		k.h, r = drv.ModuleGetFunction(m.h, d.Name)
		return r
	})
	if err != nil {
		return nil, err
	}
	gpu.DeviceOf(m.dev).NameKernel(k.h, d.Name)
	if w := gpu.DeviceOf(m.dev).Watcher(); w != nil {
		w.Describe(k.h, d.Name, usesOf(accesses))
	}
	return k, k.load()
}

// check compares the description of the kernels with their declarations.
func (src *Source) check(said map[string][]declared) error {
	seen := map[string]bool{}
	for _, d := range src.Kernels {
		switch {
		case d.Name == "" || seen[d.Name]:
			return fmt.Errorf("kernel: compile %s: a kernel has no name, or the same name as another kernel: %q", src.Name, d.Name)
		case len(d.Params) > maxArgs:
			return fmt.Errorf("kernel: compile %s: %s has %d parameters: at most %d", src.Name, d.Name, len(d.Params), maxArgs)
		}
		for i, p := range d.Params {
			if !p.known() {
				return fmt.Errorf("kernel: compile %s: parameter %d of %s has no type: %v", src.Name, i, d.Name, p)
			}
		}
		if n := machine.ParamBytes(d.stood()); n > machine.MaxParamBytes {
			return fmt.Errorf("kernel: compile %s: the parameters of %s take %d bytes: at most %d", src.Name, d.Name, n, machine.MaxParamBytes)
		}
		compare := d.compare
		if d.typed != nil {
			compare = d.typed.compare
		}
		if err := compare(said); err != nil {
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

// Close unloads the module. Launches must have completed. The driver waits for all work of the
// device: do not call Close while a collective waits for a rank that is not enqueued yet. It is
// idempotent.
func (m *Module) Close() error {
	if m == nil || !m.owner.Close() {
		return nil
	}
	for _, t := range m.typed {
		t.remove(m)
	}
	return m.unload()
}

func (m *Module) unload() error {
	err := gpu.DeviceOf(m.dev).DoInTime(func(drv cudadrv.Driver) cudadrv.Result { return drv.ModuleUnload(m.h) })
	return errors.Join(err, m.shadow.close())
}

// compile makes the image that the device's driver loads.
func (m *Module) compile(src *Source, said map[string][]declared, defs map[string]definition) ([]byte, error) {
	dev := m.dev
	if gpu.DeviceOf(dev).System().Machine != nil {
		return m.standIns(src, said, defs)
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

// standIns makes the image of Go functions that virtual devices load.
func (m *Module) standIns(src *Source, said map[string][]declared, defs map[string]definition) ([]byte, error) {
	for _, d := range src.Kernels {
		if d.Go == nil && (d.typed == nil || d.typed.call == nil) {
			return nil, fmt.Errorf("kernel: %s in %s has no Go function to stand in on virtual devices", d.Name, src.Name)
		}
	}
	limits, err := limitsOfVirtual(m.dev, src, defs)
	if err != nil {
		return nil, err
	}
	var ks []machine.Kernel
	for _, d := range src.Kernels {
		fn, params := d.Go, d.stood()
		if d.typed != nil {
			fn = d.typed.standIn(said[d.Name])
		}
		lengths := d.hasLengths()
		if lengths {
			params = append(params, slices.Repeat([]machine.Param{machine.Int64Param}, len(params))...)
		}
		def := defs[d.Name]
		ks = append(ks, machine.Kernel{Name: d.Name, Params: params, Limits: limits[d.Name], Func: func(k *machine.KernelCall) {
			if _, _, shared := k.Shape(); def.dynamic && shared == 0 {
				panic(&machine.Trouble{Status: cudadrv.ErrorIllegalAddress,
					Text: fmt.Sprintf("kernel %s declares dynamic shared memory (extern __shared__), and the launch has none: set Grid.SharedBytes", d.Name)})
			}
			run := func() {
				c := &Call{call: kern.NewCallRef(k)}
				if lengths && d.typed == nil && !kern.IsResident(src) {
					c.spans = spansOf(&d, k, said[d.Name])
				}
				fn(c)
			}
			if m.shadow.covers(&d) {
				m.shadow.run(&d, k, run)
				return
			}
			run()
		}})
	}
	return gpu.DeviceOf(m.dev).System().Machine.ModuleImage(ks), nil
}

// hasLengths reports whether launches on virtual devices pass the number of bytes at each pointer, behind
// the arguments.
func (d *Def) hasLengths() bool {
	return d.typed != nil || machine.ParamBytes(d.stood())+8*len(d.Params) <= machine.MaxParamBytes
}

// stood returns the parameters in the types of package virtual.
func (d *Def) stood() []machine.Param {
	ps := make([]machine.Param, len(d.Params))
	for i, p := range d.Params {
		ps[i] = p.virtual()
	}
	return ps
}
