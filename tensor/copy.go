package tensor

import (
	"github.com/gochorus/chorus/internal/strided"
	"github.com/gochorus/chorus/stream"
)

// Copy enqueues the copy of src to dst on s, a stream of either's device, between any two
// layouts, types, devices and the host (torch.Tensor.copy_ with non_blocking). src is
// expanded to the shape of dst. Numbers are converted as in torch: to floats by rounding
// to nearest, to integers by truncation, and to bool by a comparison with 0. If the type
// cannot represent a number, the result is undefined.
//
// If both tensors are contiguous in the same order, Copy is one copy of the driver, and so
// are long rows of a tensor on another device that become contiguous. All other copies use
// one kernel, which accesses the other device directly if the hardware supports it. If it
// does not, strided tensors are packed for the transfer. As with memory.Copy, work on the
// other device must be ordered with s, and memory of other streams must be recorded.
//
// If dst is in host memory, the host waits, as for Slice.CopyTo. If src is pinned the host
// does not wait; other host memory may change when Copy returns. Strided or converted host
// memory is packed first.
//
// The first copy or sum by a kernel on a device loads the kernels, and the driver may wait for all work of the device
// then. If a collective waits for a rank that is not enqueued yet, such a copy hangs, so copy a short tensor before.
//
// The elements of dst must not overlap, and dst must not share memory with src, unless
// both are the same elements; then Copy does nothing.
func Copy(s *stream.Stream, dst, src Tensor) error { return strided.Copy(s, *dst.at(), *src.at()) }

// CopyAll enqueues the copy of each tensor of src to the corresponding tensor of dst on s,
// like Copy. One kernel makes up to 120 copies (torch._foreach_copy_), also between
// devices that kernels can access, for tensors that need no conversion and are small and
// contiguous, or consist of contiguous rows. The tensors of dst must not share memory with
// each other or with tensors of src.
func CopyAll(s *stream.Stream, dst, src []Tensor) error { return strided.CopyAll(s, dst, src) }

// Add enqueues dst = a + b on s (torch.add with out), for tensors of one shape on the
// device of s. The sum has the type that torch promotes a and b to; the 16-bit floats
// are added in float. It is rounded to the type of dst, which must not be of a lower category.
// Bools are or-ed. 8-bit floats, which torch does not add, are added in
// float and rounded. dst may be a or b. The first sum may wait for the device, as in Copy.
func Add(s *stream.Stream, dst, a, b Tensor) error {
	return strided.Add(s, *dst.at(), *a.at(), *b.at())
}
