package fabric

import (
	"sync/atomic"

	"github.com/gochorus/chorus/kernel"
)

// A line is the data of a line; its mark is sent after it.
type line [lineWords]uint64

const lineStep = lineBytes / 8 // words of memory

// enterLines is enter for an operation by lines, which use separate memory.
func enterLines(c *kernel.Call) *party {
	p := enter(c)
	p.set += 2
	return p
}

func (p *party) lineMark() uint64 { return p.epoch + p.signature }

// lineOf returns the i-th line of b.
//
//go:norace
func lineOf(b []byte, i int) (v line) {
	for j := range v {
		v[j] = wordOf(b, i*lineWords+j)
	}
	return v
}

//go:norace
func setLine(b []byte, i int, v *line) {
	for j, word := range v {
		setWord(b, i*lineWords+j, word)
	}
}

// sendLine sends the i-th line. Its mark shows that the rest has arrived.
//
//go:norace
func (p *party) sendLine(to []uint64, i int, v *line) {
	if p.over {
		return
	}
	to = to[i*lineStep:][:lineStep]
	*(*line)(to) = *v
	atomic.StoreUint64(&to[lineWords], p.lineMark())
}

// receiveLine waits for the i-th line.
//
//go:norace
func (p *party) receiveLine(in []uint64, i int) (v line) {
	in = in[i*lineStep:][:lineStep]
	mark := p.lineMark()
	if atomic.LoadUint64(&in[lineWords]) != mark {
		p.await(func() bool { return atomic.LoadUint64(&in[lineWords]) == mark })
	}
	if !p.over { // else the sender may still write
		v = *(*line)(in)
	}
	return v
}

// reduceLine is reduce for the i-th lines.
//
//go:norace
func (p *party) reduceLine(f fold, i int, own line) (sum line) {
	var lines [maxRanks]line
	for r := range p.ranks {
		if lines[r] = own; r != p.rank {
			lines[r] = p.receiveLine(p.from(0, r), i)
		}
	}
	for j := range sum {
		for r := range p.ranks {
			p.words[r] = lines[r][j]
		}
		sum[j] = f(p.words[:p.ranks])
	}
	return sum
}

func (f fold) twoShotLines(c *kernel.Call) {
	p := enterLines(c)
	in, out := p.read(0, p.bytes), p.write(0, p.bytes)
	share := over(over(wordsIn(p.bytes), lineWords), p.ranks)
	for k := 1; k < p.ranks; k++ {
		to := p.from(k, p.rank)
		for i := range share {
			v := lineOf(in, p.after(k)*share+i)
			p.sendLine(to, i, &v)
		}
	}
	for i := range share {
		at := p.rank*share + i
		v := p.reduceLine(f, i, lineOf(in, at))
		for k := 1; k < p.ranks; k++ {
			p.sendLine(p.gathered(k), at, &v)
		}
		setLine(out, at, &v)
	}
	for k := 1; k < p.ranks; k++ {
		for i := range share {
			at := p.after(k)*share + i
			v := p.receiveLine(p.gathered(0), at)
			setLine(out, at, &v)
		}
	}
	p.leave()
}
