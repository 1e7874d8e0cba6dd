package nccl

import (
	"fmt"
	"sync"

	"github.com/gochorus/chorus/internal/ncclapi"
	"github.com/gochorus/chorus/internal/virtual/machine"
)

// A transfer is one direction of an exchange between this rank and a peer.
type transfer struct {
	peer int
	out  bool
	data []byte
	sig  *signature // sent before the data and compared; nil in collectives
}

// exchange performs transfers. Transfers with the same peer and direction run in
// order, all others concurrently, so that no order of sends and receives can
// block.
func (c *comm) exchange(list []transfer) error {
	type direction struct {
		peer int
		out  bool
	}
	directions := map[direction][]transfer{}
	for _, t := range list {
		d := direction{t.peer, t.out}
		directions[d] = append(directions[d], t)
	}
	var wg sync.WaitGroup
	errs := make(chan error, len(directions))
	for d, transfers := range directions {
		wg.Go(func() { errs <- c.transferAll(d.peer, d.out, transfers) })
	}
	wg.Wait()
	close(errs)
	for err := range errs {
		if err != nil {
			return err
		}
	}
	return nil
}

// transferAll performs transfers with one peer in one direction, in order.
func (c *comm) transferAll(peer int, out bool, list []transfer) error {
	if out {
		k, err := c.to(peer)
		if err != nil {
			return err
		}
		for _, t := range list {
			if err := k.deliver(&t); err != nil {
				return err
			}
		}
		return nil
	}
	k, err := c.from(peer)
	if err != nil {
		return err
	}
	for _, t := range list {
		if err := k.receive(&t); err != nil {
			return err
		}
	}
	return nil
}

func (k *link) deliver(t *transfer) error {
	if t.sig != nil {
		v := &claim{Magic: claimMagic, Differ: -1, Lowest: int32(k.c.rank), First: *t.sig}
		if err := k.writeClaim(v); err != nil {
			return err
		}
	}
	return k.write(t.data)
}

func (k *link) receive(t *transfer) error {
	if t.sig != nil {
		v, err := k.readClaim()
		if err != nil {
			return err
		}
		if v.First.Kind != kindSend || v.First.Count != t.sig.Count || v.First.DType != t.sig.DType {
			return k.c.disagree(k.c.rank, t.sig, k.peer, &v.First)
		}
	}
	return k.read(t.data)
}

// pointToPoint performs the sends and receives of a group.
func (c *comm) pointToPoint(o *machine.Op, works []*work) error {
	var list []transfer
	var self [2][]transfer // transfers from this rank to itself: receives, sends
	for _, w := range works {
		if err := c.faulty(w); err != nil {
			return err
		}
		src, dst, err := c.buffers(o, w)
		if err != nil {
			return err
		}
		t := transfer{peer: int(w.sig.Root), sig: &w.sig, data: dst}
		side := 0
		if w.sig.Kind == kindSend {
			t.out, t.data, side = true, src, 1
		}
		if t.peer == c.rank {
			self[side] = append(self[side], t)
		} else {
			list = append(list, t)
		}
	}
	if err := c.selfTransfers(self[0], self[1]); err != nil {
		return err
	}
	return c.exchange(list)
}

// selfTransfers pairs a rank's sends to itself with its receives, in order.
func (c *comm) selfTransfers(receives, sends []transfer) error {
	for i, t := range receives {
		s := sends[i]
		if s.sig.Count != t.sig.Count || s.sig.DType != t.sig.DType {
			return c.disagree(c.rank, s.sig, c.rank, t.sig)
		}
		copy(t.data, s.data)
	}
	return nil
}

// selfPaired checks that all sends of a rank to itself in a group have receives.
func selfPaired(works []*work) *failure {
	balance := map[*comm]int{}
	for _, w := range works {
		if int(w.sig.Root) != w.c.rank {
			continue
		}
		switch w.sig.Kind {
		case kindSend:
			balance[w.c]++
		case kindRecv:
			balance[w.c]--
		}
	}
	for c, n := range balance {
		if n != 0 {
			return &failure{ncclapi.InvalidUsage, fmt.Sprintf("rank %d has different numbers of sends to itself and receives from itself in one group", c.rank)}
		}
	}
	return nil
}

// moves reports whether a rank sends a block to a peer, and receives one from it, in an all-to-all, a gather or a scatter.
func (s *signature) moves(rank, peer int) (sends, recvs bool) {
	root := int(s.Root)
	switch s.Kind {
	case kindAlltoAll:
		return true, true
	case kindGather:
		return peer == root, rank == root
	}
	return rank == root, peer == root
}

// exchangeBlocks performs an all-to-all, a gather or a scatter. An operand has a block for each rank, or one.
func (c *comm) exchangeBlocks(s *signature, src, dst []byte) error {
	n := int(s.Count) * int(ncclapi.DType(s.DType).Size())
	block := func(p []byte, peer int) []byte {
		if len(p) == n {
			return p
		}
		return p[peer*n:][:n]
	}
	var list []transfer
	for peer := range c.n {
		sends, recvs := s.moves(c.rank, peer)
		if sends && recvs && peer == c.rank {
			copy(block(dst, peer), block(src, peer))
			continue
		}
		if sends {
			list = append(list, transfer{peer: peer, out: true, data: block(src, peer)})
		}
		if recvs {
			list = append(list, transfer{peer: peer, data: block(dst, peer)})
		}
	}
	return c.exchange(list)
}
