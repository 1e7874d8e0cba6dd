package mem

import (
	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/gpu"
)

// A CapturePool lets captures of graphs allocate from a memory pool, and NCCL register its
// memory.
type CapturePool interface {
	gpu.Holdable
	// Begin lets the capture of a graph allocate from the pool until End.
	Begin(graph string) error
	End()
	// Watch calls fn for each segment of the pool. It then calls fn for each segment that
	// the pool allocates, before its memory is used, and for each segment that the pool
	// frees, after the streams have passed it and before it is freed. stop calls fn for the
	// remaining segments as if they were freed and ends the calls; it is idempotent. If fn
	// returns an error for a new segment, the allocation fails with that error.
	//
	// fn may use the device but must not call memory: allocations that need the driver wait
	// for fn. A watched pool has no expandable segments, and a pool that has expandable
	// segments cannot be watched.
	Watch(fn func(d *device.Device, ptr, bytes uint64, taken bool) error) (stop func() error, err error)
}

// A PoolRef refers to the CapturePool of a pool. The public type embeds it.
type PoolRef struct{ p CapturePool }

// NewPoolRef returns a reference to p.
func NewPoolRef(p CapturePool) PoolRef { return PoolRef{p} }

func (r *PoolRef) pool() CapturePool { return r.p }

// HasPool is implemented by the public type that embeds a PoolRef.
type HasPool interface{ pool() CapturePool }

// PoolOf returns the CapturePool of a public pool, or nil for the zero pool.
func PoolOf(x HasPool) CapturePool { return x.pool() }

// A PoolOption is an option of pools that users do not set. The public configuration
// embeds it.
type PoolOption struct{ private bool }

func (o *PoolOption) option() *PoolOption { return o }

// HasPoolOption is implemented by the public configuration that embeds a PoolOption.
type HasPoolOption interface{ option() *PoolOption }

// MakePrivate lets the configuration make a pool without a handle that must be closed.
// Such a pool belongs to one graph or to a package of Chorus.
func MakePrivate(x HasPoolOption) { x.option().private = true }

// IsPrivate reports whether MakePrivate was called.
func IsPrivate(x HasPoolOption) bool { return x.option().private }
