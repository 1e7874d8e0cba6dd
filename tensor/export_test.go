package tensor

// HostBytes returns the memory of a host tensor from its first element on.
func HostBytes(t Tensor) []byte { return t.all() }

// LikeStrides are those of MakeLike.
func LikeStrides(t Tensor) []int { return likeStrides(t.shape, t.strides) }

// The source of the kernels and its PTX.
var (
	Source = source
	Packed = packed
)
