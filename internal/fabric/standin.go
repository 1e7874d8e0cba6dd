package fabric

import (
	"encoding/binary"
	"fmt"
	"sync/atomic"

	"github.com/gochorus/chorus/internal/inside"
	"github.com/gochorus/chorus/kernel"
)

// The functions in this file implement the kernels on virtual devices. They send the same
// words to the same places and reduce them in the same order, but with one thread for the
// whole grid. The race detector does not watch device memory, so the inner loops are without
// its calls.

// A party is a rank in an operation.
type party struct {
	c           *kernel.Call
	rank, ranks int
	slot, whole int        // words
	peers       [][]uint64 // the scratch memory of the k-th rank after this one
	control     []uint64   // the ticks, and the epoch of the abort or 0
	host        []uint32   // the first word requests the abort, the second confirms it
	signature   uint64
	epoch       uint64
	set         int              // index of the buffers that this operation uses
	over        bool             // the operation was aborted
	words       [maxRanks]uint64 // to reduce

	bytes   int
	aligned bool
}

// enter begins an operation whose operands are bytes.
func enter(c *kernel.Call) *party {
	p := meet(c)
	p.bytes, p.aligned = int(kernel.Get[uint64](c, bytesParam)), kernel.Get[uint32](c, alignedParam) != 0
	return p
}

// meet begins an operation.
func meet(c *kernel.Call) *party {
	p := &party{
		c: c, rank: int(kernel.Get[uint32](c, rankParam)), ranks: int(kernel.Get[uint32](c, ranksParam)),
		slot: int(kernel.Get[uint64](c, slotParam) / 8), whole: int(kernel.Get[uint64](c, wholeParam) / 8),
		control: kernel.Update[uint64](c, controlParam, 2), host: inside.Shared[uint32](c, hostParam, 0, 2),
		signature: kernel.Get[uint64](c, signatureParam),
	}
	p.epoch = p.control[0]/ticks + 1
	p.set = int(p.epoch & 1)
	p.over = p.control[1] != 0
	for k := range p.ranks {
		p.peers = append(p.peers, inside.Shared[uint64](c, peerParam+k, 0, signalBytes/8+setsFor(p.whole)*(p.ranks*p.slot+p.whole)))
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

// from returns the part of the k-th rank's scratch memory that rank r sends to.
func (p *party) from(k, r int) []uint64 {
	at := signalBytes/8 + p.set*(p.ranks*p.slot+p.whole) + r*p.slot
	return p.peers[k][at:]
}

func (p *party) gathered(k int) []uint64 { return p.from(k, p.ranks) }

// await returns when ready returns true, or the rank is aborted.
func (p *party) await(ready func() bool) {
	if p.over || ready() {
		return
	}
	came := false
	here := inside.Await(p.c, func() bool {
		came = ready()
		return came || atomic.LoadUint32(&p.host[0]) != 0
	})
	if !here || !came {
		p.over = true
		atomic.StoreUint32(&p.host[1], 1)
	}
}

// barrier returns when all ranks have reached it with every block.
func (p *party) barrier(n uint64) {
	want := p.epoch + p.signature + n>>1*0x9e3779b97f4a7c15
	at := func(block, rank int) uint64 {
		return (uint64(block)*maxRanks+uint64(rank))*signalWords + p.epoch&1*2 + n&1
	}
	grid := int(p.c.Grid().Blocks[0])
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

// marks returns the marks of packets in this epoch, next to each half.
func (p *party) marks() (low, high uint64) {
	return (p.epoch + p.signature) << 32, (p.epoch + p.epoch>>32 + p.signature>>32) << 32
}

// send sends the i-th word.
//
//go:norace
func (p *party) send(to []uint64, i int, word uint64) {
	if p.over {
		return // the word is not a result
	}
	low, high := p.marks()
	atomic.StoreUint64(&to[2*i], word&0xffffffff|low)
	atomic.StoreUint64(&to[2*i+1], word>>32|high)
}

// receive waits for the i-th word.
//
//go:norace
func (p *party) receive(in []uint64, i int) uint64 {
	if word, came := p.packet(in, i); came {
		return word
	}
	var word uint64
	p.await(func() (came bool) {
		word, came = p.packet(in, i)
		return came
	})
	return word
}

// packet returns the i-th word, if it has come.
//
//go:norace
func (p *party) packet(in []uint64, i int) (word uint64, came bool) {
	const mark = 0xffffffff << 32
	low, high := p.marks()
	a, b := atomic.LoadUint64(&in[2*i]), atomic.LoadUint64(&in[2*i+1])
	return a&^mark | b<<32, a&mark == low && b&mark == high
}

// wordsIn returns the number of words for bytes.
func wordsIn(bytes int) int { return over(bytes, 8) }

// wordOf returns the i-th word of b; the last one may have fewer than 8 bytes.
//
//go:norace
func wordOf(b []byte, i int) uint64 {
	b = b[min(8*i, len(b)):]
	if len(b) >= 8 {
		return binary.LittleEndian.Uint64(b)
	}
	var w [8]byte
	copy(w[:], b)
	return binary.LittleEndian.Uint64(w[:])
}

//go:norace
func setWord(b []byte, i int, v uint64) {
	b = b[min(8*i, len(b)):]
	if len(b) >= 8 {
		binary.LittleEndian.PutUint64(b, v)
		return
	}
	var w [8]byte
	binary.LittleEndian.PutUint64(w[:], v)
	copy(b, w[:])
}

// read returns n bytes of the input, of which kernels read 8 bytes at once if
// the operands are aligned.
func (p *party) read(at, n int) []byte {
	p.check(inParam, at, 8)
	return kernel.ReadAddress[uint8](p.c, p.c.Address(inParam)+uint64(at), n)
}

// write is read for the output.
func (p *party) write(at, n int) []byte {
	p.check(outParam, at, 8)
	return kernel.UpdateAddress[uint8](p.c, p.c.Address(outParam)+uint64(at), n)
}

// check panics if an operand is not aligned as the host has declared.
func (p *party) check(param, at, unit int) {
	if x := p.c.Address(param) + uint64(at); p.aligned && x%uint64(unit) != 0 {
		panic(fmt.Sprintf("the address %#x is not a multiple of %d", x, unit))
	}
}

func gatherAll(c *kernel.Call)   { enter(c).spread(0) }
func exchangeAll(c *kernel.Call) { p := enter(c); p.spread(p.bytes) }

// spread sends chunks of the input that begin every step bytes, one to each rank, and
// gathers the chunks of the other ranks.
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

// inPlace reports whether a byte of the input and a byte of the output have the same
// address.
func (p *party) inPlace(in, out int) bool {
	return p.c.Address(inParam)+uint64(in) == p.c.Address(outParam)+uint64(out)
}

func broadcastOne(c *kernel.Call) {
	p := enter(c)
	root, n := int(kernel.Get[uint32](c, lastParam)), wordsIn(p.bytes)
	var in []byte // only the root has input
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

// reduce reduces the i-th words of all ranks; own is this rank's word.
func (p *party) reduce(f fold, i int, own uint64) uint64 {
	for r := range p.ranks {
		if r == p.rank {
			p.words[r] = own
		} else {
			p.words[r] = p.receive(p.from(0, r), i)
		}
	}
	return f(p.words[:p.ranks])
}

func (f fold) reduceScatter(c *kernel.Call) {
	p := enter(c)
	chunk := func(r int) []byte { return p.read(r*p.bytes, p.bytes) }
	for k := 1; k < p.ranks; k++ {
		from, to := chunk(p.after(k)), p.from(k, p.rank)
		for i := range wordsIn(p.bytes) {
			p.send(to, i, wordOf(from, i))
		}
	}
	own, out := chunk(p.rank), p.write(0, p.bytes)
	for i := range wordsIn(p.bytes) {
		setWord(out, i, p.reduce(f, i, wordOf(own, i)))
	}
	p.leave()
}

func (f fold) oneShot(c *kernel.Call) {
	p := enter(c)
	in, out := p.read(0, p.bytes), p.write(0, p.bytes)
	for k := 1; k < p.ranks; k++ {
		to := p.from(k, p.rank)
		for i := range wordsIn(p.bytes) {
			p.send(to, i, wordOf(in, i))
		}
	}
	for i := range wordsIn(p.bytes) {
		setWord(out, i, p.reduce(f, i, wordOf(in, i)))
	}
	p.leave()
}

func (f fold) twoShotPackets(c *kernel.Call) {
	p := enter(c)
	in, out := p.read(0, p.bytes), p.write(0, p.bytes)
	share := over(wordsIn(p.bytes), p.ranks)
	for k := 1; k < p.ranks; k++ {
		to := p.from(k, p.rank)
		for i := range share {
			p.send(to, i, wordOf(in, p.after(k)*share+i))
		}
	}
	for i := range share {
		at := p.rank*share + i
		v := p.reduce(f, i, wordOf(in, at))
		for k := 1; k < p.ranks; k++ {
			p.send(p.gathered(k), at, v)
		}
		setWord(out, at, v)
	}
	for k := 1; k < p.ranks; k++ {
		for i := range share {
			at := p.after(k)*share + i
			setWord(out, at, p.receive(p.gathered(0), at))
		}
	}
	p.leave()
}

// sendCell sends half of a cell.
func (p *party) sendCell(to *uint64, v uint64) {
	if !p.over {
		atomic.StoreUint64(to, v)
	}
}

// twoShot counts in words; two words are a cell.
func (f fold) twoShot(c *kernel.Call) {
	p := enter(c)
	p.check(inParam, 0, 16)
	p.check(outParam, 0, 16)
	in, out := p.read(0, p.bytes), p.write(0, p.bytes)
	all := 2 * over(p.bytes, 16)
	share := 2 * over(all/2, p.ranks)
	// of calls do for each word of a rank's part, with its index in the whole.
	of := func(r int, do func(i, at int)) {
		for i := 0; i < share && r*share+i < all; i++ {
			do(i, r*share+i)
		}
	}
	for k := 1; k < p.ranks; k++ {
		to := p.from(k, p.rank)
		of(p.after(k), func(i, at int) { p.sendCell(&to[i], wordOf(in, at)) })
	}
	p.barrier(0)
	of(p.rank, func(i, at int) {
		for r := range p.ranks {
			if r == p.rank {
				p.words[r] = wordOf(in, at)
			} else {
				p.words[r] = atomic.LoadUint64(&p.from(0, r)[i])
			}
		}
		v := f(p.words[:p.ranks])
		for k := 1; k < p.ranks; k++ {
			p.sendCell(&p.gathered(k)[at], v)
		}
		setWord(out, at, v)
	})
	p.barrier(1)
	for k := 1; k < p.ranks; k++ {
		of(p.after(k), func(_, at int) { setWord(out, at, atomic.LoadUint64(&p.gathered(0)[at])) })
	}
	p.leave()
}

// A chunked is an operand that is divided into chunks. The part of rank r of chunk n begins n*step + r*pitch bytes after the
// beginning of the operand.
type chunked struct {
	*party
	share       int  // words of a part
	step, pitch int  // bytes
	shared      bool // by all ranks
}

// divided returns the chunks of an operand that is divided among the ranks, and parts those of operands with a part for each rank.
func (p *party) divided() *chunked {
	c := p.parts(0)
	c.step, c.pitch, c.shared = p.ranks*c.step, c.step, true
	return c
}

func (p *party) parts(pitch int) *chunked {
	share := 2 * int(kernel.Get[uint32](p.c, lastParam))
	return &chunked{party: p, share: share, step: 8 * share, pitch: pitch}
}

// part returns rank r's part of chunk n, of the input or the output, and how many words it has.
func (c *chunked) part(operand func(at, n int) []byte, n, r int) ([]byte, int) {
	left := c.bytes - n*c.step
	if c.shared {
		left -= r * c.pitch
	}
	if left <= 0 {
		return nil, 0
	}
	b := operand(n*c.step+r*c.pitch, min(left, 8*c.share))
	return b, min(2*over(len(b), cellBytes), c.share)
}

// run calls do with the number of each chunk and of as many more as the steps
// of a chunk need, and with the number of chunks, with a barrier between two
// calls.
func (c *chunked) run(more int, do func(n, count int)) {
	c.check(inParam, 0, 16)
	c.check(outParam, 0, 16)
	count := over(c.bytes, c.step)
	for n := 0; n < count+more; n++ {
		if n > 0 {
			c.barrier(uint64(n - 1))
			if c.over {
				break
			}
		}
		do(n, count)
	}
	c.leave()
}

// slotOf and gatheredOf are from and gathered for chunk n.
func (c *chunked) slotOf(k, r, n int) []uint64 { return c.from(k, r)[n&1*(c.slot/2):] }

func (c *chunked) gatheredOf(k, n int) []uint64 { return c.gathered(k)[n&1*(c.whole/2):] }

// scatter sends each other rank its part of chunk n.
func (c *chunked) scatter(n int) {
	for k := 1; k < c.ranks; k++ {
		in, words := c.part(c.read, n, c.after(k))
		to := c.slotOf(k, c.rank, n)
		for i := range words {
			c.sendCell(&to[i], wordOf(in, i))
		}
	}
}

// collect stores the parts of chunk n that the other ranks have sent.
func (c *chunked) collect(n int, from func(r int) []uint64) {
	for k := 1; k < c.ranks; k++ {
		out, words := c.part(c.write, n, c.after(k))
		for i := range words {
			setWord(out, i, atomic.LoadUint64(&from(c.after(k))[i]))
		}
	}
}

// reduceChunk reduces this rank's part of chunk n, and sends it to the other ranks if all share the operand.
func (c *chunked) reduceChunk(f fold, n int) {
	in, words := c.part(c.read, n, c.rank)
	if words == 0 {
		return
	}
	to := c.write(n*c.step, len(in))
	if c.shared {
		to, _ = c.part(c.write, n, c.rank)
	}
	for i := range words {
		for r := range c.ranks {
			if r == c.rank {
				c.words[r] = wordOf(in, i)
			} else {
				c.words[r] = atomic.LoadUint64(&c.slotOf(0, r, n)[i])
			}
		}
		v := f(c.words[:c.ranks])
		for k := 1; k < c.ranks && c.shared; k++ {
			c.sendCell(&c.gatheredOf(k, n)[c.rank*c.share+i], v)
		}
		setWord(to, i, v)
	}
}

func (f fold) allReduceChunks(k *kernel.Call) {
	c := enter(k).divided()
	c.run(2, func(n, count int) {
		if n < count {
			c.scatter(n)
		}
		if n > 0 && n <= count {
			c.reduceChunk(f, n-1)
		}
		if n > 1 {
			c.collect(n-2, func(r int) []uint64 { return c.gatheredOf(0, n-2)[r*c.share:] })
		}
	})
}

func (f fold) reduceScatterChunks(k *kernel.Call) {
	p := enter(k)
	c := p.parts(p.bytes)
	c.run(1, func(n, count int) {
		if n < count {
			c.scatter(n)
		}
		if n > 0 {
			c.reduceChunk(f, n-1)
		}
	})
}

func gatherChunks(k *kernel.Call)   { p := enter(k); p.exchange(p.parts(0)) }
func exchangeChunks(k *kernel.Call) { p := enter(k); p.exchange(p.parts(p.bytes)) }

// exchange sends the parts of the input, and stores those of all ranks in the output.
func (p *party) exchange(in *chunked) {
	out := p.parts(p.bytes)
	keep := p.inPlace(p.rank*in.pitch, p.rank*out.pitch)
	out.run(1, func(n, count int) {
		if n < count {
			in.scatter(n)
			if !keep {
				from, _ := in.part(p.read, n, p.rank)
				to, _ := out.part(p.write, n, p.rank)
				copy(to, from)
			}
		}
		if n > 0 {
			out.collect(n-1, func(r int) []uint64 { return out.slotOf(0, r, n-1) })
		}
	})
}
