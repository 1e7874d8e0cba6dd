package kernel

import (
	"errors"
	"fmt"
	"slices"
	"sync"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/gpu"
	"github.com/gochorus/chorus/internal/handle"
	"github.com/gochorus/chorus/internal/inside"
	"github.com/gochorus/chorus/internal/virtual/machine"
)

// A Source is CUDA C++ with one or more kernels.
type Source struct {
	Name    string   // shown in compiler messages
	CUDA    string   // the kernels are extern "C" __global__ void
	Options []string // for NVRTC, such as --use_fast_math
	Kernels []Def
	//lint:ignore U1000 internal/inside finds the field by the method that it promotes
	sourceOption
}

//lint:ignore U1000 the field above is of this type
type sourceOption = handle.Ref[inside.SourceOption]

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
	source  string   // its name
	forever bool     // it lives as long as its device

	graphsMu sync.Mutex
	graphs   []gpu.Holder // that have captured launches
}

// A heldModule is a module as the graphs see it that have captured launches of its kernels.
type heldModule Module

func (m *heldModule) Hold(g gpu.Holder) {
	m.graphsMu.Lock()
	defer m.graphsMu.Unlock()
	if !slices.Contains(m.graphs, g) {
		m.graphs = append(m.graphs, g)
	}
}

func (m *heldModule) LetGo(g gpu.Holder) {
	m.graphsMu.Lock()
	defer m.graphsMu.Unlock()
	m.graphs = slices.DeleteFunc(m.graphs, func(h gpu.Holder) bool { return h == g })
}

// inUse returns an error if a graph has captured launches of the module.
func (m *Module) inUse(op string) error {
	m.graphsMu.Lock()
	defer m.graphsMu.Unlock()
	if len(m.graphs) == 0 {
		return nil
	}
	return fmt.Errorf("%s of %s on %s: %s uses it: close the graph first", op, m.source, m.dev, m.graphs[0])
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
	case inside.IsResident(src):
		m.forever = true
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
	m := &Module{dev: dev, source: src.Name, kernels: map[string]*Kernel{}}
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

// Close unloads the module, whose launches must have completed. The driver
// waits for all work of the device: do not call Close while a collective waits
// for a rank that is not enqueued yet. While a graph has launches of the module, Close
// returns an error and the module stays loaded. It is idempotent.
func (m *Module) Close() error {
	if m == nil || m.owner.Closed() {
		return nil
	}
	if err := m.inUse("kernel: close the module"); err != nil {
		return err
	}
	if !m.owner.Close() {
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

// compile returns the image that the device's driver loads.
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

// standIns returns the image of Go functions that virtual devices load.
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
				c := &Call{call: handle.NewRef(k)}
				if lengths && d.typed == nil && !inside.IsResident(src) {
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

// Attributes are the properties of a compiled kernel (cuFuncGetAttribute). On virtual
// devices they are those that the source declares: __launch_bounds__, static shared memory and very
// large local arrays. If NVRTC is installed, they are those of the source compiled for an H200.
type Attributes struct {
	MaxThreads            int // of a block
	Registers             int // of a thread
	SharedBytes           int // static, of a block
	LocalBytes            int // of a thread: arrays, and spilled registers
	ConstBytes            int // of the module
	MaxDynamicSharedBytes int // of a block: the maximum of Grid's shared bytes
}

// Attributes returns the properties of the compiled kernel, without a call of
// the driver.
func (k *Kernel) Attributes() Attributes { return k.attrs }

// limits are the limits of a device for launches.
type limits struct {
	multiprocessors int
	usualShared     int // maximum bytes of a block without permission for more
	mostShared      int
	cooperative     bool
}

func limitsOf(dev *device.Device) (l limits, err error) {
	cooperative := 0
	for _, a := range []struct {
		to   *int
		attr cudadrv.Attribute
	}{
		{&l.multiprocessors, cudadrv.AttrMultiprocessorCount},
		{&l.usualShared, cudadrv.AttrMaxSharedMemoryPerBlock},
		{&l.mostShared, cudadrv.AttrMaxSharedMemoryOptin},
		{&cooperative, cudadrv.AttrCooperativeLaunch},
	} {
		v, err := gpu.DeviceOf(dev).Attribute(a.attr)
		if err != nil {
			return l, err
		}
		*a.to = int(v)
	}
	l.cooperative = cooperative != 0
	return l, nil
}

// load queries the attributes of the kernel.
func (k *Kernel) load() error {
	for _, a := range []struct {
		to   *int
		attr cudadrv.FuncAttribute
	}{
		{&k.attrs.MaxThreads, cudadrv.FuncMaxThreadsPerBlock},
		{&k.attrs.Registers, cudadrv.FuncRegisters},
		{&k.attrs.SharedBytes, cudadrv.FuncSharedBytes},
		{&k.attrs.LocalBytes, cudadrv.FuncLocalBytes},
		{&k.attrs.ConstBytes, cudadrv.FuncConstBytes},
	} {
		err := gpu.DeviceOf(k.module.dev).Do(func(drv cudadrv.Driver) cudadrv.Result {
			v, r := drv.FuncGetAttribute(a.attr, k.h)
			*a.to = int(v)
			return r
		})
		if err != nil {
			return err
		}
	}
	l := &k.module.limits
	k.attrs.MaxDynamicSharedBytes = max(l.mostShared, l.usualShared) - k.attrs.SharedBytes
	k.shared.Store(uint32(max(0, l.usualShared-k.attrs.SharedBytes)))
	return nil
}

// Occupancy returns how many blocks with the given numbers of threads and bytes of dynamic
// shared memory are on a multiprocessor at once
// (cuOccupancyMaxActiveBlocksPerMultiprocessor).
func (k *Kernel) Occupancy(threads, sharedBytes int) (blocks int, err error) {
	if err := k.askable("occupancy", sharedBytes); err != nil {
		return 0, err
	}
	if threads < 1 || threads > k.attrs.MaxThreads {
		return 0, fmt.Errorf("kernel: occupancy of %s: %d threads of a block: want 1 to %d", k.name, threads, k.attrs.MaxThreads)
	}
	err = gpu.DeviceOf(k.module.dev).Do(func(drv cudadrv.Driver) cudadrv.Result {
		n, r := drv.OccupancyMaxActiveBlocksPerMultiprocessor(k.h, int32(threads), uintptr(sharedBytes))
		blocks = int(n)
		return r
	})
	if err != nil {
		return 0, fmt.Errorf("kernel: occupancy of %s: %w", k.name, err)
	}
	return blocks, nil
}

// BestBlock returns the number of threads per block that maximizes the number of resident
// threads, and the number of such blocks that fill the device
// (cuOccupancyMaxPotentialBlockSize). limit is the maximum number of threads; 0 means
// no limit.
func (k *Kernel) BestBlock(sharedBytes, limit int) (threads, blocks int, err error) {
	if err := k.askable("best block", sharedBytes); err != nil {
		return 0, 0, err
	}
	if limit < 0 {
		return 0, 0, fmt.Errorf("kernel: best block of %s: a limit of %d threads: want 1 or more, or 0 for none", k.name, limit)
	}
	err = gpu.DeviceOf(k.module.dev).Do(func(drv cudadrv.Driver) cudadrv.Result {
		g, b, r := drv.OccupancyMaxPotentialBlockSize(k.h, uintptr(sharedBytes), int32(min(limit, int(maxThreads[0]))))
		threads, blocks = int(b), int(g)
		return r
	})
	if err != nil {
		return 0, 0, fmt.Errorf("kernel: best block of %s: %w", k.name, err)
	}
	return threads, blocks, nil
}

// askable validates the arguments of an occupancy query, and allows the kernel the shared
// memory in question, because CUDA answers for the currently allowed size.
func (k *Kernel) askable(what string, sharedBytes int) error {
	switch {
	case k == nil || k.module == nil:
		return fmt.Errorf("kernel: %s: no kernel given", what)
	case k.module.owner.Closed():
		return fmt.Errorf("kernel: %s of %s: module: %w", what, k.name, device.ErrClosed)
	case sharedBytes < 0 || sharedBytes > k.attrs.MaxDynamicSharedBytes:
		return fmt.Errorf("kernel: %s of %s: %d bytes of dynamic shared memory: want 0 to %d", what, k.name, sharedBytes, k.attrs.MaxDynamicSharedBytes)
	case uint32(sharedBytes) > k.shared.Load():
		if err := k.allowShared(uint32(sharedBytes)); err != nil {
			return fmt.Errorf("kernel: %s of %s: %w", what, k.name, err)
		}
	}
	return nil
}

// tooLarge returns the error of a cooperative grid that does not fit.
func (k *Kernel) tooLarge(g Grid, cause error) error {
	threads := int(g.Threads[0] * g.Threads[1] * g.Threads[2])
	each, err := k.Occupancy(threads, int(g.SharedBytes))
	if err != nil {
		return fmt.Errorf("kernel: launch %s together: %w", k.name, cause)
	}
	return fmt.Errorf("kernel: launch %s together: %d blocks of %d threads and %d bytes of dynamic shared memory: %d fit on %s, %d on each of %d multiprocessors: %w",
		k.name, uint64(g.Blocks[0])*uint64(g.Blocks[1])*uint64(g.Blocks[2]), threads, g.SharedBytes,
		each*k.module.limits.multiprocessors, k.module.dev, each, k.module.limits.multiprocessors, cause)
}
