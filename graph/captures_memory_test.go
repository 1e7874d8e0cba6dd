package graph_test

import (
	"errors"

	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/nccl"
)

// buffer allocates on the call's stream, outside of the capture.
func (r *rig) buffer(bytes int) *memory.Buffer {
	b, err := memory.Alloc(r.on, bytes)
	r.must(err)
	r.later(b.Close)
	return b
}

var memoryCalls = []call{
	{name: "memory.Alloc: new segment", prepare: func(r *rig) func() error {
		r.must(memory.EmptyCache(r.dev))
		return func() error {
			b, err := memory.Alloc(r.on, 40<<20)
			if err == nil {
				r.later(b.Close)
			}
			return err
		}
	}},
	{name: "memory.Alloc: cached", prepare: func(r *rig) func() error {
		r.must(r.buffer(1 << 20).Close())
		return func() error {
			b, err := memory.Alloc(r.on, 1<<20)
			if err == nil {
				r.later(b.Close)
			}
			return err
		}
	}},
	{name: "memory.Alloc, memory.Buffer.Close", prepare: func(r *rig) func() error {
		return func() error {
			b, err := memory.Alloc(r.on, 1<<20)
			return errors.Join(err, b.Close())
		}
	}},
	{name: "memory.Alloc: out of memory", prepare: func(r *rig) func() error {
		return func() error {
			b, err := memory.Alloc(r.on, 1<<42)
			return errors.Join(err, b.Close())
		}
	}},
	{name: "memory.Buffer.Close: allocated before the capture", prepare: func(r *rig) func() error {
		b := r.buffer(1 << 20)
		return b.Close
	}},
	{name: "memory.Buffer.RecordStream: allocated before the capture", prepare: func(r *rig) func() error {
		b, err := memory.Alloc(r.third, 1<<20)
		r.must(err)
		r.later(b.Close)
		return func() error { return b.RecordStream(r.on) }
	}},
	{name: "memory.Buffer.RecordStream, memory.Buffer.Close: allocated before the capture", prepare: func(r *rig) func() error {
		b, err := memory.Alloc(r.third, 1<<20)
		r.must(err)
		r.later(b.Close)
		return func() error { return errors.Join(b.RecordStream(r.on), b.Close()) }
	}},
	{name: "memory.Buffer.RecordStream, memory.Buffer.Close: allocated in the capture", prepare: func(r *rig) func() error {
		return func() error {
			b, err := memory.Alloc(r.captured, 1<<20)
			if err != nil {
				return err
			}
			r.later(b.Close)
			return errors.Join(b.RecordStream(r.on), b.Close())
		}
	}},
	{name: "memory.Make", prepare: func(r *rig) func() error {
		return func() error {
			x, err := memory.Make[float32](r.on, 100)
			if err == nil {
				r.later(x.Close)
			}
			return err
		}
	}},
	{name: "memory.MakeFlat", prepare: func(r *rig) func() error {
		return func() error {
			x, _, err := memory.MakeFlat[float32](r.on, 100, 10)
			if err == nil {
				r.later(x.Close)
			}
			return err
		}
	}},
	{name: "memory.MakeFrom", prepare: func(r *rig) func() error {
		return func() error {
			x, err := memory.MakeFrom(r.on, make([]float32, 100))
			if err == nil {
				r.later(x.Close)
			}
			return err
		}
	}},
	{name: "memory.AllocRaw, memory.RecordStreamRaw, memory.FreeRaw", prepare: func(r *rig) func() error {
		return func() error {
			p, err := memory.AllocRaw(r.on, 1<<20)
			if err != nil {
				return err
			}
			return errors.Join(memory.RecordStreamRaw(p, r.on), memory.FreeRaw(r.dev, p))
		}
	}},
	{name: "memory.FreeRaw: allocated before the capture", prepare: func(r *rig) func() error {
		p, err := memory.AllocRaw(r.on, 1<<20)
		r.must(err)
		return func() error {
			err := memory.FreeRaw(r.dev, p)
			if err != nil {
				r.later(func() error { return memory.FreeRaw(r.dev, p) })
			}
			return err
		}
	}},
	{name: "memory.EmptyCache", nowhere: true, prepare: func(r *rig) func() error {
		b, err := memory.Alloc(r.third, 40<<20)
		r.must(errors.Join(err, b.Close()))
		return func() error { return memory.EmptyCache(r.dev) }
	}},
	{name: "memory.EmptyCache: freed block that waits for a stream", prepare: func(r *rig) func() error {
		b := r.buffer(40 << 20)
		r.must(b.RecordStream(r.third))
		r.must(b.Close())
		return func() error { return memory.EmptyCache(r.dev) }
	}},
	{name: "memory.StatsOf", nowhere: true, prepare: onDevice(func(r *rig) error { _, err := memory.StatsOf(r.dev); return err })},
	{name: "memory.ResetPeakStats, memory.ResetAccumulatedStats", nowhere: true, prepare: onDevice(func(r *rig) error {
		return errors.Join(memory.ResetPeakStats(r.dev), memory.ResetAccumulatedStats(r.dev))
	})},
	{name: "memory.Allocated, memory.Reserved", nowhere: true, prepare: onDevice(func(r *rig) error {
		_, err := memory.Allocated(r.dev)
		_, e := memory.Reserved(r.dev)
		return errors.Join(err, e)
	})},
	{name: "memory.Fraction, memory.SetFraction", nowhere: true, prepare: onDevice(func(r *rig) error {
		f, err := memory.Fraction(r.dev)
		return errors.Join(err, memory.SetFraction(r.dev, f))
	})},
	{name: "memory.TakeSnapshot", nowhere: true, prepare: onDevice(func(r *rig) error { _, err := memory.TakeSnapshot(r.dev); return err })},
	{name: "memory.RecordHistory", nowhere: true, prepare: onDevice(func(r *rig) error {
		return errors.Join(memory.RecordHistory(r.dev, &memory.HistoryConfig{}), memory.RecordHistory(r.dev, nil))
	})},
	{name: "memory.Slice.IPCHandle", prepare: func(r *rig) func() error {
		x := r.slice(r.on, elems)
		return func() error { _, err := x.IPCHandle(); return err }
	}},
	{name: "memory.IPCCollect", nowhere: true, prepare: onDevice(func(r *rig) error { return memory.IPCCollect(r.dev) })},
}

var copyCalls = []call{
	{name: "memory.Slice.CopyFrom", prepare: func(r *rig) func() error {
		host := make([]float32, elems)
		return func() error { return r.y.CopyFrom(r.on, host) }
	}},
	{name: "memory.Slice.CopyTo", prepare: func(r *rig) func() error {
		host := make([]float32, elems)
		return func() error { return r.y.CopyTo(r.on, host) }
	}},
	{name: "memory.Slice.CopyFrom: 64 MiB", prepare: func(r *rig) func() error {
		x, host := r.slice(r.home, 16<<20), make([]float32, 16<<20)
		return func() error { return x.CopyFrom(r.on, host) }
	}},
	{name: "memory.Slice.CopyFromPinned", prepare: func(r *rig) func() error {
		h := r.pinned(elems)
		return func() error { return r.y.CopyFromPinned(r.on, h) }
	}},
	{name: "memory.Slice.CopyToPinned", prepare: func(r *rig) func() error {
		h := r.pinned(elems)
		return func() error { return r.y.CopyToPinned(r.on, h) }
	}},
	{name: "memory.Copy", prepare: func(r *rig) func() error {
		z := r.slice(r.home, elems)
		return func() error { return memory.Copy(r.on, z, r.y) }
	}},
	{name: "memory.Slice.Zero", prepare: func(r *rig) func() error {
		return func() error { return r.y.Zero(r.on) }
	}},
}

var poolCalls = []call{
	{name: "memory.Pool.Use: allocates", prepare: func(r *rig) func() error {
		p := memory.NewPool(nil)
		r.later(p.Close)
		return func() error {
			return p.Use(r.on, func() error {
				b, err := memory.Alloc(r.on, 1<<20)
				if err == nil {
					r.later(b.Close)
				}
				return err
			})
		}
	}},
	{name: "memory.Pool.Use: allocates by an Allocator", prepare: func(r *rig) func() error {
		p := memory.NewPool(&memory.PoolConfig{Allocator: memory.Driver})
		r.later(p.Close)
		return func() error {
			return p.Use(r.on, func() error {
				b, err := memory.Alloc(r.on, 1<<20)
				if err == nil {
					r.later(b.Close)
				}
				return err
			})
		}
	}},
	{name: "memory.Pool.Use: allocates by nccl.Allocator", prepare: func(r *rig) func() error {
		p := memory.NewPool(&memory.PoolConfig{Allocator: nccl.Allocator})
		r.later(p.Close)
		return func() error {
			return p.Use(r.on, func() error {
				b, err := memory.Alloc(r.on, 1<<20)
				if err == nil {
					r.later(b.Close)
				}
				return err
			})
		}
	}},
	{name: "memory.Pool.Snapshot", nowhere: true, prepare: func(r *rig) func() error {
		p, _ := r.usedPool()
		return func() error { p.Snapshot(); return nil }
	}},
	{name: "memory.Pool.Close: with free memory", nowhere: true, prepare: func(r *rig) func() error {
		p, b := r.usedPool()
		r.must(b.Close())
		return p.Close
	}},
	{name: "memory.Pool.Close: with memory in use", nowhere: true, prepare: func(r *rig) func() error {
		p, _ := r.usedPool()
		return p.Close
	}},
}

// usedPool returns a pool from which the buffer was allocated.
func (r *rig) usedPool() (p *memory.Pool, b *memory.Buffer) {
	p = memory.NewPool(nil)
	r.later(p.Close)
	r.must(p.Use(r.third, func() (err error) {
		b, err = memory.Alloc(r.third, 1<<20)
		return err
	}))
	r.later(b.Close)
	return p, b
}

// pinned returns page-locked memory of the host.
func (r *rig) pinned(n int) *memory.Pinned[float32] {
	h, err := memory.MakePinned[float32](r.dev, n)
	r.must(err)
	r.later(h.Close)
	return h
}

var pinnedCalls = []call{
	{name: "memory.MakePinned: new memory", nowhere: true, prepare: func(r *rig) func() error {
		r.must(memory.EmptyHostCache(r.dev))
		return func() error {
			h, err := memory.MakePinned[float32](r.dev, 1<<20)
			if err == nil {
				r.later(h.Close)
			}
			return err
		}
	}},
	{name: "memory.MakePinned: cached", nowhere: true, prepare: func(r *rig) func() error {
		r.must(r.pinned(elems).Close())
		return func() error {
			h, err := memory.MakePinned[float32](r.dev, elems)
			if err == nil {
				r.later(h.Close)
			}
			return err
		}
	}},
	{name: "memory.MakePinned: used, closed, and made again", prepare: func(r *rig) func() error {
		return func() error {
			for range 2 {
				h, err := memory.MakePinned[float32](r.dev, elems)
				if err != nil {
					return err
				}
				if err := errors.Join(r.y.CopyFromPinned(r.on, h), h.Close()); err != nil {
					return err
				}
			}
			return nil
		}
	}},
	{name: "memory.Pinned.Close: unused", nowhere: true, prepare: func(r *rig) func() error { return r.pinned(elems).Close }},
	{name: "memory.Pinned.Close: used before", prepare: func(r *rig) func() error {
		h := r.pinned(elems)
		r.must(r.y.CopyFromPinned(r.on, h))
		return h.Close
	}},
	{name: "memory.Pinned.Close: used in the capture", prepare: func(r *rig) func() error {
		h := r.pinned(elems)
		return func() error { return errors.Join(r.y.CopyFromPinned(r.on, h), h.Close()) }
	}},
	{name: "memory.Pinned.RecordStream, memory.Pinned.Close", prepare: func(r *rig) func() error {
		h := r.pinned(elems)
		return func() error { return errors.Join(h.RecordStream(r.on), h.Close()) }
	}},
	{name: "memory.PinSlice, memory.Pinned.Close", nowhere: true, prepare: func(r *rig) func() error {
		own := make([]float32, 1<<20)
		return func() error {
			h, err := memory.PinSlice(r.dev, own)
			if err != nil {
				return err
			}
			r.later(h.Close)
			return h.Close()
		}
	}},
	{name: "memory.EmptyHostCache", nowhere: true, prepare: func(r *rig) func() error {
		r.must(r.pinned(1 << 20).Close())
		return func() error { return memory.EmptyHostCache(r.dev) }
	}},
	{name: "memory.ReadHostStats", nowhere: true, prepare: onDevice(func(r *rig) error { memory.ReadHostStats(r.dev); return nil })},
}
