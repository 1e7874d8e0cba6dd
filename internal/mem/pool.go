package mem

import "github.com/gochorus/chorus/internal/gpu"

// A CapturePool lets captures of graphs allocate from a memory pool.
type CapturePool interface {
	gpu.Holdable
	// Begin lets the capture of a graph allocate from the pool until End.
	Begin(graph string) error
	End()
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
