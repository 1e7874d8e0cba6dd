package comm

import (
	"context"
	"errors"
	"fmt"

	"github.com/gochorus/chorus/memory"
)

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
