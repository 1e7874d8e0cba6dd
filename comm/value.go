package comm

import (
	"bytes"
	"context"
	"encoding/gob"
	"encoding/json"
	"errors"
	"fmt"
	"reflect"

	"github.com/gochorus/chorus/internal/gpu"
	"github.com/gochorus/chorus/memory"
)

// A Codec encodes values as bytes and decodes them.
type Codec interface {
	Encode(v any) ([]byte, error)
	Decode(data []byte, v any) error
}

// Gob is encoding/gob, which preserves Go's types. JSON is encoding/json, which other
// programs can read too.
var (
	Gob  Codec = gobCodec{}
	JSON Codec = jsonCodec{}
)

type gobCodec struct{}

func (gobCodec) Encode(v any) ([]byte, error) {
	var b bytes.Buffer
	err := gob.NewEncoder(&b).Encode(v)
	return b.Bytes(), err
}

// Decode skips the value before it decodes it: package gob allocates a map for as many elements as the data says, and 20 bytes
// of another rank can say any number. If the elements are not there, skipping fails. It does not look into interfaces.
func (gobCodec) Decode(data []byte, v any) error {
	if err := gob.NewDecoder(bytes.NewReader(data)).DecodeValue(reflect.Value{}); err != nil {
		return err
	}
	return gob.NewDecoder(bytes.NewReader(data)).Decode(v)
}

type jsonCodec struct{}

func (jsonCodec) Encode(v any) ([]byte, error)    { return json.Marshal(v) }
func (jsonCodec) Decode(data []byte, v any) error { return json.Unmarshal(data, v) }

// MaxValueBytes is the maximum size of an encoded value.
const MaxValueBytes = 64 << 20

// A ValueError reports a value that could not be sent, and its rank. All ranks return it.
type ValueError struct {
	Op     string // such as "broadcast value"
	Rank   int
	Reason string
}

func (e *ValueError) Error() string {
	return fmt.Sprintf("comm: %s: the value of rank %d: %s", e.Op, e.Rank, e.Reason)
}

// BroadcastValue sends rank root's value to all ranks. In the process of root,
// v points to the value; in the other processes, to the variable that receives
// it (torch.distributed.broadcast_object_list). A nil codec means Gob, which
// requires that the interface types in the value are registered. BroadcastValue
// is for small host data such as names, counts and settings: it waits for all
// operations on the group's streams. It ends early under the same conditions as
// Wait. If the value cannot be encoded, all ranks return a *ValueError.
// Collective.
func BroadcastValue[T any](ctx context.Context, g *Group, root int, v *T, codec Codec) error {
	const op = "broadcast value"
	if err := checkValue(g, op, root, v != nil); err != nil {
		return err
	}
	codec = orGob(codec)
	var mine encodedValue
	if g.hasRank(root) {
		mine = encodeValue(codec, v)
	}
	header := make([]int64, headerLen)
	if err := broadcastHost(ctx, g, root, mine.header(), header); err != nil {
		return err
	}
	if err := checkHeader(op, root, header[0]); err != nil {
		return g.conclude(ctx, true, err)
	}
	data := make([]byte, header[0])
	if mine.data == nil {
		mine.data = data
	}
	if err := broadcastHost(ctx, g, root, mine.data, data); err != nil || g.hasRank(root) && header[1] == 0 {
		return err
	}
	return g.conclude(ctx, header[1] != 0, decodeValue(codec, op, root, header[1] != 0, data, v))
}

// conclude returns the error of values that the ranks have exchanged. If all ranks find one there, they meet first: a rank
// that closed the group now would end the exchange of those that do not have the values yet. Whatever the
// barrier returns, this rank has the reason.
func (g *Group) conclude(ctx context.Context, all bool, err error) error {
	if all && err != nil && len(g.members) < g.size {
		_ = g.Barrier(ctx)
	}
	return err
}

// broadcastHost copies rank root's elements on the host to all ranks. On the other ranks from
// only has the length.
func broadcastHost[T memory.Element](ctx context.Context, g *Group, root int, from, to []T) error {
	xs, err := MakeFrom(g, from)
	if err != nil {
		return err
	}
	defer xs.Close()
	if err := BroadcastFrom(g, root, xs...); err != nil {
		return err
	}
	return fetch(ctx, g, xs[0], to)
}

// GatherValues returns the values of all ranks on all ranks, by rank
// (torch.distributed.all_gather_object). It takes one value for each local
// rank, and otherwise behaves like BroadcastValue.
func GatherValues[T any](ctx context.Context, g *Group, codec Codec, values ...T) ([]T, error) {
	const op = "gather values"
	if err := checkValue(g, op, 0, true); err != nil {
		return nil, err
	}
	if len(values) != len(g.members) {
		return nil, fmt.Errorf("comm: %s: %d values for %d local ranks: %w", op, len(values), len(g.members), ErrMismatch)
	}
	return gatherEncoded[T](ctx, g, op, orGob(codec), values)
}

// gatherEncoded is GatherValues with valid arguments.
func gatherEncoded[T any](ctx context.Context, g *Group, op string, codec Codec, values []T) ([]T, error) {
	headers, all := make([][]int64, len(values)), make([][]byte, len(values))
	for i := range values {
		x := encodeValue(codec, &values[i])
		headers[i], all[i] = x.header(), x.data
	}
	header, err := gatherHost(ctx, g, headers, nil)
	if err != nil {
		return nil, err
	}
	counts, failed := make([]int, g.size), false
	for r := range counts {
		if err := checkHeader(op, r, header[r*headerLen]); err != nil {
			return nil, g.conclude(ctx, true, err)
		}
		counts[r] = int(header[r*headerLen])
		failed = failed || header[r*headerLen+1] != 0
	}
	data, err := gatherHost(ctx, g, all, counts)
	if err != nil {
		return nil, err
	}
	out := make([]T, g.size)
	for r, n := range counts {
		if err := decodeValue(codec, op, r, header[r*headerLen+1] != 0, data[:n], &out[r]); err != nil {
			return nil, g.conclude(ctx, failed, err)
		}
		data = data[n:]
	}
	return out, nil
}

// gatherHost returns the elements of all ranks on all ranks. lists has one list
// for each local rank. counts are the lengths by rank, or nil if they are
// equal.
func gatherHost[T memory.Element](ctx context.Context, g *Group, lists [][]T, counts []int) ([]T, error) {
	src := make(Shards[T], len(lists))
	dst := make(Shards[T], len(lists))
	defer func() { _ = errors.Join(src.Close(), dst.Close()) }()
	total := len(lists[0]) * g.size
	if counts != nil {
		total = 0
		for _, n := range counts {
			total += n
		}
	}
	for i, list := range lists {
		var err error
		if src[i], err = memory.MakeFrom(g.members[i].stream, list); err != nil {
			return nil, err
		}
		if dst[i], err = memory.Make[T](g.members[i].stream, total); err != nil {
			return nil, err
		}
	}
	gather := func() error { return AllGather(g, dst, src) }
	if counts != nil {
		gather = func() error { return AllGatherV(g, dst, src, counts) }
	}
	if err := gather(); err != nil {
		return nil, err
	}
	out := make([]T, total)
	return out, fetch(ctx, g, dst[0], out)
}

// fetch waits for the group and copies the first local rank's memory to the host.
func fetch[T memory.Element](ctx context.Context, g *Group, x memory.Slice[T], to []T) error {
	if err := g.Wait(ctx); err != nil {
		return err
	}
	return x.CopyTo(g.members[0].stream, to)
}

// MakeFrom is Make followed by a copy of data to each local rank.
func MakeFrom[T memory.Element](g *Group, data []T) (Shards[T], error) {
	xs, err := Make[T](g, len(data))
	if err != nil {
		return nil, err
	}
	for i := range xs {
		if err := xs[i].CopyFrom(g.members[i].stream, data); err != nil {
			return nil, errors.Join(err, xs.Close())
		}
	}
	return xs, nil
}

// An encodedValue is an encoded value, or the reason why it could not be encoded.
type encodedValue struct {
	data   []byte
	failed bool
}

// headerLen is the number of values in the header of an encodedValue: its length, and whether it is
// an error text.
const headerLen = 2

func (p *encodedValue) header() []int64 {
	h := []int64{int64(len(p.data)), 0}
	if p.failed {
		h[1] = 1
	}
	return h
}

// checkHeader validates the length that a rank has sent. It fails on all ranks
// or on none, because they have the same numbers.
func checkHeader(op string, rank int, n int64) error {
	if n < 0 || n > MaxValueBytes {
		return &ValueError{op, rank, fmt.Sprintf("its size is %d bytes: want 0 to %d", n, MaxValueBytes)}
	}
	return nil
}

// encodeValue encodes a value. If that fails or panics, the encodedValue is the
// error, because the other ranks wait for one.
func encodeValue[T any](codec Codec, v *T) (p encodedValue) {
	defer func() {
		if r := recover(); r != nil {
			p = encodedValue{fmt.Appendf(nil, "its codec panicked: %v", r), true}
		}
	}()
	var x any = *v
	if codec == Gob && reflect.TypeFor[T]().Kind() == reflect.Interface {
		x = v // so that gob encodes an interface, as the receivers expect
	}
	data, err := codec.Encode(x)
	switch {
	case err != nil:
		return encodedValue{[]byte(err.Error()), true}
	case len(data) > MaxValueBytes:
		return encodedValue{fmt.Appendf(nil, "%d bytes: want at most %d; send it as memory of a device", len(data), MaxValueBytes), true}
	}
	return encodedValue{append(make([]byte, 0, len(data)+1), data...), false} // not nil, even if empty
}

// maxErrorText limits the error text of another rank, in bytes.
const maxErrorText = 4096

// decodeValue decodes into a new variable: codecs do not overwrite fields that the data lacks. A panic of the codec is an error, because
// the data is another process's.
func decodeValue[T any](codec Codec, op string, rank int, failed bool, data []byte, to *T) (err error) {
	defer func() {
		if r := recover(); r != nil {
			err = fmt.Errorf("comm: %s: decode the value of rank %d: its codec panicked: %v", op, rank, r)
		}
	}()
	if failed {
		return &ValueError{Op: op, Rank: rank, Reason: told(string(data))}
	}
	var v T
	if err := codec.Decode(data, &v); err != nil {
		return fmt.Errorf("comm: %s: decode the value of rank %d: %w", op, rank, err)
	}
	*to = v
	return nil
}

func orGob(c Codec) Codec {
	if c == nil {
		return Gob
	}
	return c
}

// checkValue validates the arguments before anything is sent.
func checkValue(g *Group, op string, root int, there bool) error {
	if err := g.check(op); err != nil {
		return err
	}
	if !there {
		return fmt.Errorf("comm: %s: v is nil: want a pointer to the value", op)
	}
	if root < 0 || root >= g.size {
		return fmt.Errorf("comm: %s: rank %d of %d does not exist: %w", op, root, g.size, ErrMismatch)
	}
	for i := range g.members {
		if err := gpu.StreamOf(g.members[i].stream).RefuseWait("comm: " + op); err != nil {
			return err
		}
	}
	return nil
}

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
			return nil, g.conclude(ctx, true, err)
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
			return nil, g.conclude(ctx, failed != 0, err)
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

// encodeAll encodes the list of the root, or returns one error, and the rank
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

// SendValue sends a value from the first local rank to rank peer, which must call RecvValue
// (torch.distributed.send_object_list). It returns when the peer has received the value. If the
// value cannot be encoded, both ranks return a *ValueError. Otherwise it behaves like
// BroadcastValue. Two ranks must not send to each other at the same time.
func SendValue[T any](ctx context.Context, g *Group, peer int, v T, codec Codec) error {
	const op = "send value"
	if err := checkPeer(g, op, peer, true); err != nil {
		return err
	}
	p := encodeValue(orGob(codec), &v)
	if err := sendHost(ctx, g, peer, p.header()); err != nil {
		return err
	}
	if err := sendHost(ctx, g, peer, p.data); err != nil {
		return err
	}
	if p.failed {
		return &ValueError{op, g.Rank(), string(p.data)}
	}
	return nil
}

// RecvValue receives a value on the first local rank, from rank peer, which must call SendValue
// (torch.distributed.recv_object_list). If the peer sends anything else, such as a size above
// MaxValueBytes, the group is broken. Otherwise it behaves like BroadcastValue; if the value
// cannot be decoded, *v does not change.
func RecvValue[T any](ctx context.Context, g *Group, peer int, v *T, codec Codec) error {
	const op = "receive value"
	if err := checkPeer(g, op, peer, v != nil); err != nil {
		return err
	}
	header := make([]int64, headerLen)
	if err := recvHost(ctx, g, peer, header); err != nil {
		return err
	}
	if err := checkHeader(op, peer, header[0]); err != nil {
		return g.fail(err) // the peer waits until its data is received
	}
	data := make([]byte, header[0])
	if err := recvHost(ctx, g, peer, data); err != nil {
		return err
	}
	return decodeValue(orGob(codec), op, peer, header[1] != 0, data, v)
}

// checkPeer validates the arguments of a transfer between the first local rank and a peer.
func checkPeer(g *Group, op string, peer int, there bool) error {
	if err := checkValue(g, op, peer, there); err != nil {
		return err
	}
	if peer == g.Rank() {
		return fmt.Errorf("comm: %s: rank %d is the peer of itself: name another rank: %w", op, peer, ErrMismatch)
	}
	return nil
}

// sendHost sends elements on the host to a peer, and waits for the group.
func sendHost[T memory.Element](ctx context.Context, g *Group, peer int, list []T) (err error) {
	if len(list) == 0 {
		return nil // the peer knows the length
	}
	x, err := memory.MakeFrom(g.members[0].stream, list)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, x.Close()) }()
	if err := Send(g, peer, x); err != nil {
		return err
	}
	return g.Wait(ctx)
}

// recvHost receives elements from a peer.
func recvHost[T memory.Element](ctx context.Context, g *Group, peer int, list []T) (err error) {
	if len(list) == 0 {
		return nil
	}
	x, err := memory.Make[T](g.members[0].stream, len(list))
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, x.Close()) }()
	if err := Recv(g, peer, x); err != nil {
		return err
	}
	return fetch(ctx, g, x, list)
}
