package kernel

import (
	"context"
	"errors"
	"fmt"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/cudahost"
	"github.com/gochorus/chorus/internal/kern"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
)

// open compiles the source for both sides.
func (v *verification) open(ctx context.Context, src *Source) error {
	sys, err := device.NewSystem(&device.SystemConfig{Backend: "virtual", VirtualDevices: 1})
	if err != nil {
		return err
	}
	v.closers = append(v.closers, sys.Close)
	if v.goes, err = v.openDevice(sys.Devices()[0], src, "the Go function"); err != nil {
		return err
	}
	if v.cfg.Host {
		v.cuda, err = v.openHost(ctx, src)
		return err
	}
	dev := v.cfg.Device
	if dev == nil {
		sys, err := device.Default()
		if err != nil {
			return fmt.Errorf("there is no GPU: set VerifyConfig.Host to run the source on the host: %w", err)
		}
		dev = sys.Devices()[0]
	}
	if backend := dev.System().Backend(); backend != "cuda" {
		return fmt.Errorf("%s is not a GPU, its backend is %s: set VerifyConfig.Host to run the source on the host", dev, backend)
	}
	v.cuda, err = v.openDevice(dev, src, "CUDA on "+dev.String())
	return err
}

// A deviceSide runs the kernels of a module.
type deviceSide struct {
	name string
	s    *stream.Stream
	m    *Module
}

func (v *verification) openDevice(dev *device.Device, src *Source, name string) (*deviceSide, error) {
	s, err := stream.New(dev, nil)
	if err != nil {
		return nil, err
	}
	v.closers = append(v.closers, s.Close)
	alone := *src
	kern.GoOnly(&alone) // Verify compares it itself
	m, err := Compile(dev, &alone)
	if err != nil {
		return nil, err
	}
	v.closers = append(v.closers, m.Close)
	return &deviceSide{name, s, m}, nil
}

func (d *deviceSide) String() string { return d.name }

func (d *deviceSide) run(ctx context.Context, kernel string, g Grid, args []testArg) (err error) {
	k, err := d.m.Kernel(kernel)
	if err != nil {
		return err
	}
	memories := make([]memory.Slice[byte], len(args))
	defer func() {
		for _, x := range memories {
			err = errors.Join(err, x.Close())
		}
	}()
	list := make([]Arg, len(args))
	for i := range args {
		if args[i].memory != nil {
			if memories[i], err = memory.MakeFrom(d.s, args[i].memory); err != nil {
				return err
			}
		}
		list[i] = args[i].arg(memories[i])
	}
	if err := k.Launch(d.s, g, list...); err != nil {
		return err
	}
	if err := d.s.Sync(ctx); err != nil {
		return errors.Join(err, d.reports())
	}
	for i, x := range memories {
		if err := x.CopyTo(d.s, args[i].memory); err != nil {
			return err
		}
	}
	return d.reports()
}

// arg returns the argument of a launch. x has the memory of a pointer that is not null.
func (a *testArg) arg(x memory.Slice[byte]) Arg {
	if _, ok := a.param.isStruct(); ok {
		return Bytes(a.value)
	}
	if a.memory != nil {
		return Arg{kind: Pointer, elem: a.elem, bits: x.Ptr() + guard, argDevice: kern.On(x.Device(), len(a.value))}
	}
	bits := uint64(0)
	for i, b := range a.value {
		bits |= uint64(b) << (8 * i)
	}
	return Arg{kind: a.param, bits: bits}
}

// reports returns the mistakes that virtual devices have found.
func (d *deviceSide) reports() error {
	var errs []error
	for _, r := range d.s.Device().System().Reports() {
		errs = append(errs, errors.New(r))
	}
	return errors.Join(errs...)
}

// A hostSide runs the source on the host.
type hostSide struct{ p *cudahost.Program }

func (v *verification) openHost(ctx context.Context, src *Source) (*hostSide, error) {
	var names []string
	for _, d := range src.Kernels {
		names = append(names, d.Name)
	}
	p, err := cudahost.Compile(ctx, src.CUDA, src.Options, names)
	if err != nil {
		return nil, err
	}
	v.closers = append(v.closers, p.Close)
	return &hostSide{p}, nil
}

func (h *hostSide) String() string { return "the source on the host" }

func (h *hostSide) run(ctx context.Context, kernel string, g Grid, args []testArg) error {
	var list []cudahost.Arg
	for _, a := range args {
		switch {
		case a.memory != nil:
			list = append(list, cudahost.Arg{Memory: a.memory, Before: guard})
		case a.param == Pointer:
			list = append(list, cudahost.Arg{Null: true})
		default:
			list = append(list, cudahost.Arg{Value: a.value})
		}
	}
	return h.p.Run(ctx, kernel, g.Blocks, g.Threads, g.SharedBytes, list)
}
