package comm

import (
	"bytes"
	"context"
	"encoding/gob"
	"encoding/json"
	"errors"
	"fmt"
	"reflect"

	"github.com/gochorus/chorus/memory"
)

// A Codec turns values into bytes and back.
type Codec interface {
	Encode(v any) ([]byte, error)
	Decode(data []byte, v any) error
}

// Gob is encoding/gob, which keeps Go's types; JSON is encoding/json, which other
// programs read too.
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

func (gobCodec) Decode(data []byte, v any) error {
	return gob.NewDecoder(bytes.NewReader(data)).Decode(v)
}

type jsonCodec struct{}

func (jsonCodec) Encode(v any) ([]byte, error)    { return json.Marshal(v) }
func (jsonCodec) Decode(data []byte, v any) error { return json.Unmarshal(data, v) }

// MaxValueBytes is how large a value may be as bytes.
const MaxValueBytes = 64 << 20

// A ValueError says which rank's value could not be sent. All ranks get it.
type ValueError struct {
	Op     string // "broadcast value" or "gather values"
	Rank   int
	Reason string
}

func (e *ValueError) Error() string {
	return fmt.Sprintf("comm: %s: the value of rank %d: %s", e.Op, e.Rank, e.Reason)
}

// BroadcastValue gives rank root's value to all ranks: v points to it in the process
// that has root, and to where it goes in the others
// (torch.distributed.broadcast_object_list). codec nil is Gob. It is for small things
// of the host such as names, counts and settings: it waits for all that is on the
// group's streams. It ends early as Wait does; a value that cannot be encoded is a
// *ValueError on all ranks. What v pointed to in the others is replaced. The types that an
// interface holds are to be registered with gob. Collective.
func BroadcastValue[T any](ctx context.Context, g *Group, root int, v *T, codec Codec) error {
	const op = "broadcast value"
	if err := checkValue(g, op, root, v != nil); err != nil {
		return err
	}
	codec = orGob(codec)
	var mine parcel
	if g.hasRank(root) {
		mine = pack(codec, v)
	}
	heads, err := MakeFrom(g, mine.head())
	if err != nil {
		return err
	}
	defer heads.Close()
	if err := BroadcastFrom(g, root, heads...); err != nil {
		return err
	}
	head := make([]int64, headLen)
	if err := fetch(ctx, g, heads[0], head); err != nil {
		return err
	}
	if err := checkHead(op, root, head[0]); err != nil {
		return err
	}
	if mine.data == nil {
		mine.data = make([]byte, head[0])
	}
	data, err := MakeFrom(g, mine.data)
	if err != nil {
		return err
	}
	defer data.Close()
	if err := BroadcastFrom(g, root, data...); err != nil {
		return err
	}
	got := make([]byte, head[0])
	if err := fetch(ctx, g, data[0], got); err != nil || g.hasRank(root) && head[1] == 0 {
		return err
	}
	return unpack(codec, op, root, head[1] != 0, got, v)
}

// GatherValues gives all ranks the values of all, by rank
// (torch.distributed.all_gather_object): values has one for each local rank. The rest
// is as for BroadcastValue.
func GatherValues[T any](ctx context.Context, g *Group, codec Codec, values ...T) ([]T, error) {
	const op = "gather values"
	if err := checkValue(g, op, 0, true); err != nil {
		return nil, err
	}
	if len(values) != len(g.members) {
		return nil, fmt.Errorf("comm: %s: %d values for %d local ranks: %w", op, len(values), len(g.members), ErrMismatch)
	}
	codec = orGob(codec)
	parcels := make([]parcel, len(values))
	heads := make([][]int64, len(values))
	for i := range values {
		parcels[i] = pack(codec, &values[i])
		heads[i] = parcels[i].head()
	}
	head, err := gatherHost(ctx, g, heads, nil)
	if err != nil {
		return nil, err
	}
	counts := make([]int, g.size)
	all := make([][]byte, len(values))
	for r := range counts {
		if err := checkHead(op, r, head[r*headLen]); err != nil {
			return nil, err
		}
		counts[r] = int(head[r*headLen])
	}
	for i, p := range parcels {
		all[i] = p.data
	}
	data, err := gatherHost(ctx, g, all, counts)
	if err != nil {
		return nil, err
	}
	out := make([]T, g.size)
	for r, n := range counts {
		if err := unpack(codec, op, r, head[r*headLen+1] != 0, data[:n], &out[r]); err != nil {
			return nil, err
		}
		data = data[n:]
	}
	return out, nil
}

// gatherHost gives all ranks the elements of all, of which each local rank has a
// list. counts are the lengths by rank; nil where all are alike.
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

// fetch waits for the group and copies what the first local rank has.
func fetch[T memory.Element](ctx context.Context, g *Group, x memory.Slice[T], to []T) error {
	if err := g.Wait(ctx); err != nil {
		return err
	}
	return x.CopyTo(g.members[0].stream, to)
}

// MakeFrom is Make, and copies data to each local rank.
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

// A parcel is a value as bytes, or why there are none.
type parcel struct {
	data   []byte
	failed bool
}

// headLen is how many numbers tell of a parcel: its length, and whether it is the
// reason why there is no value.
const headLen = 2

func (p *parcel) head() []int64 {
	h := []int64{int64(len(p.data)), 0}
	if p.failed {
		h[1] = 1
	}
	return h
}

// checkHead checks the length that a rank has told. All ranks have the same numbers.
func checkHead(op string, rank int, n int64) error {
	if n < 0 || n > MaxValueBytes {
		return &ValueError{op, rank, fmt.Sprintf("it is said to have %d bytes: want 0 to %d", n, MaxValueBytes)}
	}
	return nil
}

// pack encodes a value. A failure, or panic, is sent in its place, or the others would wait.
func pack[T any](codec Codec, v *T) (p parcel) {
	defer func() {
		if r := recover(); r != nil {
			p = parcel{fmt.Appendf(nil, "its codec panicked: %v", r), true}
		}
	}()
	var x any = *v
	if codec == Gob && reflect.TypeFor[T]().Kind() == reflect.Interface {
		x = v // so that it is sent as what the others decode, an interface
	}
	data, err := codec.Encode(x)
	switch {
	case err != nil:
		return parcel{[]byte(err.Error()), true}
	case len(data) > MaxValueBytes:
		return parcel{fmt.Appendf(nil, "%d bytes: want at most %d; send it as memory of a device", len(data), MaxValueBytes), true}
	}
	return parcel{append(make([]byte, 0, len(data)+1), data...), false} // not nil, even if empty
}

// unpack decodes a value to a new one: codecs leave what was there where they have nothing.
func unpack[T any](codec Codec, op string, rank int, failed bool, data []byte, to *T) error {
	if failed {
		return &ValueError{Op: op, Rank: rank, Reason: string(data)}
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

// checkValue checks what can be wrong before anything is sent.
func checkValue(g *Group, op string, root int, there bool) error {
	if err := g.checkWait(op); err != nil {
		return err
	}
	if !there {
		return fmt.Errorf("comm: %s: no place for the value given", op)
	}
	if root < 0 || root >= g.size {
		return fmt.Errorf("comm: %s: rank %d of %d does not exist: %w", op, root, g.size, ErrMismatch)
	}
	for i := range g.members {
		if err := g.members[i].stream.RefuseWait("comm: " + op); err != nil {
			return err
		}
	}
	return nil
}
