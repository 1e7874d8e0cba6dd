package fabric

import (
	"sync/atomic"

	"github.com/gochorus/chorus/kernel"
)

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
