package comm

import (
	"context"
	"errors"
	"fmt"

	"github.com/gochorus/chorus/memory"
)

// ScatterValues sends each rank its value of rank root's list, which has one value for each
// rank, and returns the values of the local ranks (torch.distributed.scatter_object_list). The
// other processes pass nil. If the list has another length, or a value cannot be encoded, all
// ranks return a *ValueError; its Rank is the root or the rank that the value is for. Otherwise
// ScatterValues behaves like BroadcastValue. Collective.
func ScatterValues[T any](ctx context.Context, g *Group, root int, values []T, codec Codec) ([]T, error) {
	const op = "scatter values"
	if err := checkValue(g, op, root, true); err != nil {
		return nil, err
	}
	codec = orGob(codec)
	mine := scattered{header: make([]int64, headerLen*g.size)}
	if g.hasRank(root) {
		mine.set(encodeAll(codec, root, g.size, values))
	}
	all := make([]int64, len(mine.header))
	if err := broadcastHost(ctx, g, root, mine.header, all); err != nil {
		return nil, err
	}
	for r := range g.size {
		if err := checkHeader(op, r, all[headerLen*r]); err != nil {
			return nil, err
		}
		if about := all[headerLen*r+1]; about < 0 || about > int64(g.size) {
			return nil, &ValueError{op, root, fmt.Sprintf("its list names rank %d of %d", about-1, g.size)}
		}
	}
	data, err := scatterHost(ctx, g, root, mine.data, all)
	if err != nil {
		return nil, err
	}
	out := make([]T, len(data))
	for i, b := range data {
		rank := g.members[i].comm.Rank()
		failed := all[headerLen*rank+1]
		if failed != 0 {
			rank = int(failed) - 1
		}
		if err := decodeValue(codec, op, rank, failed != 0, b, &out[i]); err != nil {
			return nil, err
		}
	}
	return out, nil
}

// A scattered is the root's list in encoded form.
type scattered struct {
	// header has two numbers for each rank: the length of its data, and 0 if the data is a value.
	// If the data is an error text, the second number is 1 more than the rank that it is about.
	header []int64
	data   []byte // of all ranks
}

// encodeAll encodes the list of the root. If that fails, it returns one error, and the rank
// that the error is about.
func encodeAll[T any](codec Codec, root, size int, values []T) (list []encodedValue, about int) {
	if len(values) != size {
		text := fmt.Sprintf("%s for %s: want one for each", plural(len(values), "value"), plural(size, "rank"))
		return []encodedValue{{[]byte(text), true}}, root
	}
	for r := range values {
		x := encodeValue(codec, &values[r])
		if x.failed {
			return []encodedValue{x}, r
		}
		list = append(list, x)
	}
	return list, 0
}

// set stores the result of encodeAll: every rank gets its value, or the error.
func (s *scattered) set(list []encodedValue, about int) {
	for r := range len(s.header) / headerLen {
		x := list[min(r, len(list)-1)]
		s.header[headerLen*r] = int64(len(x.data))
		if x.failed {
			s.header[headerLen*r+1] = int64(about) + 1
		}
		s.data = append(s.data, x.data...)
	}
}

// scatterHost sends each rank its part of the root's data, and returns the parts of the local
// ranks.
func scatterHost(ctx context.Context, g *Group, root int, data []byte, header []int64) (parts [][]byte, err error) {
	var src, dst Shards[uint8]
	defer func() { err = errors.Join(err, src.Close(), dst.Close()) }()
	var sends, recvs [][]int
	for i := range g.members {
		m := &g.members[i]
		out, in, given := make([]int, g.size), make([]int, g.size), []byte{}
		in[root] = int(header[headerLen*m.comm.Rank()])
		if m.comm.Rank() == root {
			for r := range out {
				out[r] = int(header[headerLen*r])
			}
			given = data
		}
		x, err := memory.MakeFrom(m.stream, given)
		if err != nil {
			return nil, err
		}
		src = append(src, x)
		y, err := memory.Make[uint8](m.stream, in[root])
		if err != nil {
			return nil, err
		}
		dst, sends, recvs, parts = append(dst, y), append(sends, out), append(recvs, in), append(parts, make([]byte, in[root]))
	}
	if err := AllToAllV(g, dst, recvs, src, sends); err != nil {
		return nil, err
	}
	if err := g.Wait(ctx); err != nil {
		return nil, err
	}
	for i := range parts {
		if err := dst[i].CopyTo(g.members[i].stream, parts[i]); err != nil {
			return nil, err
		}
	}
	return parts, nil
}
