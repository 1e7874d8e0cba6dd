package fabric

import (
	"encoding/binary"
	"fmt"
	"sync/atomic"

	"github.com/gochorus/chorus/kernel"
)

// The functions in this file stand in for the kernels on virtual devices. They send
// the same words to the same places and reduce them in the same order, but by one
// thread for all of a grid.

// A party is a rank within an operation.
type party struct {
	c           *kernel.Call
	rank, ranks int
	slot, whole int        // words
	peers       [][]uint64 // the scratch memory of the k-th rank after this one
	control     []uint64   // the ticks, and the epoch in which the rank gave up or 0
	host        []uint32   // not 0 when the rank gives up, and when it has
	signature   uint64
	epoch       uint64
	set         int  // of the slots and the whole that belong to this operation
	over        bool // given up

	bytes   int
	aligned bool
}

func enter(c *kernel.Call) *party {
	p := &party{
		c: c, rank: int(c.Uint32(rankParam)), ranks: int(c.Uint32(ranksParam)),
		slot: int(c.Uint64(slotParam) / 8), whole: int(c.Uint64(wholeParam) / 8),
		control: kernel.Update[uint64](c, controlParam, 2), host: kernel.Shared[uint32](c, hostParam, 0, 2),
		signature: c.Uint64(signatureParam), bytes: int(c.Uint64(bytesParam)), aligned: c.Uint32(alignedParam) != 0,
	}
	p.epoch = p.control[0]/ticks + 1
	p.set = int(p.epoch & 1)
	p.over = p.control[1] != 0
	for k := range p.ranks {
		p.peers = append(p.peers, kernel.Shared[uint64](c, peerParam+k, 0, signalBytes/8+sets*(p.ranks*p.slot+p.whole)))
	}
	return p
}

// leave ends the epoch.
func (p *party) leave() {
	p.control[0] = p.epoch * ticks
	if p.over && p.control[1] == 0 {
		p.control[1] = p.epoch
	}
}

// after returns the k-th rank after this one.
func (p *party) after(k int) int { return (p.rank + k) % p.ranks }

// from returns where the k-th rank's scratch has what rank r sends to it.
func (p *party) from(k, r int) []uint64 {
	at := signalBytes/8 + p.set*(p.ranks*p.slot+p.whole) + r*p.slot
	return p.peers[k][at:]
}

func (p *party) gathered(k int) []uint64 { return p.from(k, p.ranks) }

// await returns when ready reports true, or the rank gives up.
func (p *party) await(ready func() bool) {
	if p.over || ready() {
		return
	}
	came := false
	here := p.c.Await(func() bool {
		came = ready()
		return came || atomic.LoadUint32(&p.host[0]) != 0
	})
	if !here || !came {
		p.over = true
		atomic.StoreUint32(&p.host[1], 1)
	}
}

// barrier returns when all ranks have come to it with every block.
func (p *party) barrier(n uint64) {
	want := p.epoch + p.signature
	at := func(block, rank int) uint64 {
		return (uint64(block)*maxRanks+uint64(rank))*signalWords + p.epoch&1*2 + n
	}
	grid := int(p.c.Blocks()[0])
	for k := 1; k < p.ranks && !p.over; k++ {
		for b := range grid {
			atomic.StoreUint64(&p.peers[k][at(b, p.rank)], want)
		}
	}
	for k := 1; k < p.ranks; k++ {
		for b := range grid {
			signal := &p.peers[0][at(b, p.after(k))]
			p.await(func() bool { return atomic.LoadUint64(signal) == want })
		}
	}
}

// marks are what packets have beside their halves in this epoch.
func (p *party) marks() (low, high uint64) {
	return (p.epoch + p.signature) << 32, (p.epoch + p.epoch>>32 + p.signature>>32) << 32
}

// send sends the i-th word.
func (p *party) send(to []uint64, i int, word uint64) {
	if p.over {
		return // it is no result
	}
	low, high := p.marks()
	atomic.StoreUint64(&to[2*i], word&0xffffffff|low)
	atomic.StoreUint64(&to[2*i+1], word>>32|high)
}

// receive waits for the i-th word.
func (p *party) receive(in []uint64, i int) uint64 {
	const mark = 0xffffffff << 32
	low, high := p.marks()
	var a, b uint64
	p.await(func() bool {
		a, b = atomic.LoadUint64(&in[2*i]), atomic.LoadUint64(&in[2*i+1])
		return a&mark == low && b&mark == high
	})
	return a&^mark | b<<32
}

// wordsIn is how many words bytes are.
func wordsIn(bytes int) int { return over(bytes, 8) }

// wordOf returns the i-th word of b, of which the last may have fewer than 8 bytes.
func wordOf(b []byte, i int) uint64 {
	var w [8]byte
	copy(w[:], b[min(8*i, len(b)):])
	return binary.LittleEndian.Uint64(w[:])
}

func setWord(b []byte, i int, v uint64) {
	var w [8]byte
	binary.LittleEndian.PutUint64(w[:], v)
	copy(b[min(8*i, len(b)):], w[:])
}

// read returns n bytes of the input, of which kernels take 8 as one where they are said
// to be aligned.
func (p *party) read(at, n int) []byte {
	p.check(inParam, at, 8)
	return kernel.ReadAt[uint8](p.c, inParam, at, n)
}

// write is read for the output.
func (p *party) write(at, n int) []byte {
	p.check(outParam, at, 8)
	return kernel.UpdateAt[uint8](p.c, outParam, at, n)
}

// check ends the kernel where it is told something wrong.
func (p *party) check(param, at, unit int) {
	if x := p.c.Address(param) + uint64(at); p.aligned && x%uint64(unit) != 0 {
		panic(fmt.Sprintf("the address %#x is no multiple of %d", x, unit))
	}
}

func gatherAll(c *kernel.Call)   { enter(c).spread(0) }
func exchangeAll(c *kernel.Call) { p := enter(c); p.spread(p.bytes) }

// spread sends chunks of the input that begin every step bytes, one to each rank, and
// gathers what comes.
func (p *party) spread(step int) {
	n := wordsIn(p.bytes)
	own := p.read(p.rank*step, p.bytes)
	for k := 1; k < p.ranks; k++ {
		in, to := p.read(p.after(k)*step, p.bytes), p.from(k, p.rank)
		for i := range n {
			p.send(to, i, wordOf(in, i))
		}
	}
	if !p.inPlace(p.rank*step, p.rank*p.bytes) {
		copy(p.write(p.rank*p.bytes, p.bytes), own)
	}
	for k := 1; k < p.ranks; k++ {
		r := p.after(k)
		out, in := p.write(r*p.bytes, p.bytes), p.from(0, r)
		for i := range n {
			setWord(out, i, p.receive(in, i))
		}
	}
	p.leave()
}

// inPlace reports whether a byte of the input is that of the output.
func (p *party) inPlace(in, out int) bool {
	return p.c.Address(inParam)+uint64(in) == p.c.Address(outParam)+uint64(out)
}

func broadcastOne(c *kernel.Call) {
	p := enter(c)
	root, n := int(c.Uint32(rootParam)), wordsIn(p.bytes)
	var in []byte // nobody but the root has any
	if p.rank == root {
		in = p.read(0, p.bytes)
	} else {
		n = 1
	}
	for k := 1; k < p.ranks; k++ {
		to := p.from(k, p.rank)
		for i := range n {
			p.send(to, i, wordOf(in, i))
		}
	}
	if p.rank == root && !p.inPlace(0, 0) {
		copy(p.write(0, p.bytes), in)
	}
	for k := 1; k < p.ranks; k++ {
		r := p.after(k)
		if r != root {
			p.receive(p.from(0, r), 0)
			continue
		}
		out := p.write(0, p.bytes)
		for i := range wordsIn(p.bytes) {
			setWord(out, i, p.receive(p.from(0, r), i))
		}
	}
	p.leave()
}
