package fabric

import (
	"encoding/binary"
	"math"
	"unsafe"

	"github.com/gochorus/chorus/internal/dtype"
	"github.com/gochorus/chorus/internal/quant"
	"github.com/gochorus/chorus/kernel"
	"github.com/gochorus/chorus/memory"
)

// The functions in this file implement the kernels of experts.cu on virtual devices, with the same results. A receiver computes
// the places of rows from the ids of all ranks, also if it has got them in its slots.

// An expertsCall is a launch.
type expertsCall struct {
	*normFormat
	*ExpertLayer
	c *kernel.Call
}

// call32 returns the 32-bit parameter at i as a number.
func call32(c *kernel.Call, i int) int { return int(kernel.Get[uint32](c, i)) }

// expertsOf returns a launch whose shape begins with parameter at, which is
// after the rank for linked kernels.
func (f *normFormat) expertsOf(c *kernel.Call, rank, at int) *expertsCall {
	return &expertsCall{f, &ExpertLayer{
		DType: f.dtype, Rank: call32(c, rank), Ranks: call32(c, rank+1),
		Experts: call32(c, at), TopK: call32(c, at+1), Hidden: call32(c, at+2), MaxTokens: call32(c, at+3), Small: call32(c, at+4) == 1,
	}, c}
}

// bytesOf returns the bytes of words.
func bytesOf(words []uint64) []byte {
	return unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(words))), 8*len(words))
}

// ids returns n ids at a parameter, and floats n float32.
func (e *expertsCall) ids(param, n int) []int32 {
	if n == 0 {
		return nil
	}
	return kernel.ReadAddress[int32](e.c, e.c.Address(param), n)
}

func (e *expertsCall) floats(param, n int) []float32 {
	if n == 0 || e.c.Address(param) == 0 {
		return nil
	}
	return kernel.ReadAddress[float32](e.c, e.c.Address(param), n)
}

// row returns the address of row i of an operand.
func (e *expertsCall) row(param, i int) uint64 {
	return e.c.Address(param) + uint64(i*e.elementBytes())
}

// home returns the rank of an expert.
func (e *expertsCall) home(id int32) int { return int(id) / e.Own() }

func (e *expertsCall) names(id int32) bool { return uint32(id) < uint32(e.Experts) }

// sendTokens is the function of the source with the operands from in on. The
// memory of each rank is in slots.
func (e *expertsCall) sendTokens(in, tokensParam int, slots map[int][]byte, everyRow bool) {
	tokens := call32(e.c, tokensParam)
	ids, weights := e.ids(in+1, tokens*e.TopK), e.floats(in+2, tokens*e.TopK)
	weighted := uint32(0)
	if e.c.Address(in+2) != 0 {
		weighted = 1
	}
	for _, slot := range slots {
		binary.LittleEndian.PutUint32(slot[e.weightedAt():], weighted)
		for i := range e.MaxTokens * e.TopK {
			id, w := int32(-1), float32(0)
			if i < len(ids) && e.names(ids[i]) {
				id = ids[i]
				if weights != nil {
					w = weights[i]
				}
			}
			binary.LittleEndian.PutUint32(slot[e.idsAt()+4*i:], uint32(id))
			if weighted == 1 {
				binary.LittleEndian.PutUint32(slot[e.weightsAt()+4*i:], math.Float32bits(w))
			}
		}
	}
	for t := range tokens {
		wanted := map[int]bool{}
		for _, id := range ids[t*e.TopK:][:e.TopK] {
			if e.names(id) {
				wanted[e.home(id)] = true
			}
		}
		row := make([]byte, e.rowBytes())
		if e.Small {
			quant.Open(e.c, e.DType, memory.Float8E4M3, e.row(in, t), 0, e.Hidden).ToBlocks(row[:quant.ChunkBytes(e.Hidden)], 0, e.Hidden)
		} else {
			copy(row, kernel.ReadAddress[uint8](e.c, e.row(in, t), len(row)))
		}
		for r, slot := range slots {
			if everyRow || wanted[r] {
				copy(slot[t*e.rowBytes():], row)
			}
		}
	}
}

// eachRow is the function of the source.
func (e *expertsCall) eachRow(idsOf func(r int) []int32, row func(own, place, r, t int), done func(own, rows int)) {
	for own := range e.Own() {
		place := 0
		for r := range e.Ranks {
			ids := idsOf(r)
			for t := range e.MaxTokens {
				for _, id := range ids[t*e.TopK:][:e.TopK] {
					if id == int32(e.Rank*e.Own()+own) {
						row(own, place, r, t)
						place++
						break
					}
				}
			}
		}
		done(own, place)
	}
}

// moved returns what another library has moved, by rank, with n bytes of each, and slots what the ranks have sent themselves.
func (e *expertsCall) moved(n int) [][]byte {
	in, pitch := e.c.Address(0), kernel.Get[uint64](e.c, 1)
	list := make([][]byte, e.Ranks)
	for r := range list {
		list[r] = kernel.ReadAddress[uint8](e.c, in+uint64(r)*pitch, n)
	}
	return list
}

func (e *expertsCall) slots(p *party) [][]byte {
	list := make([][]byte, e.Ranks)
	for r := range list {
		list[r] = bytesOf(p.from(0, r)[:p.slot])
	}
	return list
}

// receiveTokens stores the rows, the counts and the routes at three parameters from out on.
func (e *expertsCall) receiveTokens(slots [][]byte, out int) {
	c, counts, routes, n := e.c, out+1, out+2, e.MaxTokens*e.TopK
	idsOf := func(r int) []int32 { return elementsOf[int32](slots[r][e.idsAt():][:4*n]) }
	numbers, all := kernel.Update[int32](c, counts, e.Own()), kernel.Update[int32](c, routes, e.Ranks*n)
	for r := range e.Ranks {
		copy(all[r*n:], idsOf(r))
	}
	e.eachRow(idsOf, func(own, place, r, t int) {
		row := slots[r][t*e.rowBytes():][:e.rowBytes()]
		to := kernel.UpdateAddress[uint8](c, e.row(out, own*e.Capacity()+place), e.elementBytes())
		weighted := binary.LittleEndian.Uint32(slots[r][e.weightedAt():]) != 0
		if !e.Small && !weighted {
			copy(to, row)
			return
		}
		factor := float32(0)
		for k, id := range idsOf(r)[t*e.TopK:][:e.TopK] {
			if id == int32(e.Rank*e.Own()+own) && weighted {
				factor += elementsOf[float32](slots[r][e.weightsAt():][:4*n])[t*e.TopK+k]
			}
		}
		var v []float32
		if e.Small {
			v = quant.Decode(e.DType, memory.Float8E4M3, row[:quant.ChunkBytes(e.Hidden)])
		} else {
			v = e.load(row)
		}
		if weighted {
			for i := range v {
				v[i] *= factor
			}
		}
		e.store(to, v)
	}, func(own, rows int) { numbers[own] = int32(rows) })
}

// load returns the elements of a row as floats, and store rounds floats to a row.
func (e *expertsCall) load(row []byte) []float32 {
	v := make([]float32, e.Hidden)
	for i := 0; i < len(v); i += e.count {
		e.unpack(wordOf(row, i/e.count), v[i:i+e.count])
	}
	return v
}

func (e *expertsCall) store(row []byte, v []float32) {
	for i := 0; i < len(v); i += e.count {
		setWord(row, i/e.count, e.pack(v[i:i+e.count]))
	}
}

// A choice is a Choice of the source.
type choice struct {
	id    int32
	seat  int
	again bool
}

// choicesOf returns the choices of a token.
func (e *expertsCall) choicesOf(ids []int32) []choice {
	list := make([]choice, len(ids))
	for k, id := range ids {
		if list[k].id = -1; !e.names(id) {
			continue
		}
		list[k].id = id
		for _, x := range list[:k] {
			switch {
			case x.id == id:
				list[k].again, list[k].seat = true, x.seat
			case x.id >= 0 && !x.again && !list[k].again && e.home(x.id) == e.home(id):
				list[k].seat++
			}
		}
	}
	return list
}

// sendRows is the function of the source with y and the routes from parameter in on.
func (e *expertsCall) sendRows(in int, slot func(r int) []byte) {
	n := e.MaxTokens * e.TopK
	routes := e.ids(in+1, e.Ranks*n)
	e.eachRow(func(r int) []int32 { return routes[r*n:][:n] }, func(own, place, r, t int) {
		for _, x := range e.choicesOf(routes[r*n+t*e.TopK:][:e.TopK]) {
			if x.id == int32(e.Rank*e.Own()+own) && !x.again {
				copy(slot(r)[(t*e.seats()+x.seat)*e.elementBytes():], kernel.ReadAddress[uint8](e.c, e.row(in, own*e.Capacity()+place), e.elementBytes()))
			}
		}
	}, func(int, int) {})
}

// receiveRows adds the rows of each token. Its parameters from in on are the
// routes, the weights, the result, the rows of the choices and the number of
// tokens.
func (e *expertsCall) receiveRows(slots [][]byte, in int) {
	c, out, rows, n, tokens := e.c, in+2, in+3, e.MaxTokens*e.TopK, call32(e.c, in+4)
	routes, weights := e.ids(in, e.Ranks*n)[e.Rank*n:], e.floats(in+1, tokens*e.TopK)
	for t := range tokens {
		sum := make([]float32, e.Hidden)
		for k, x := range e.choicesOf(routes[t*e.TopK:][:e.TopK]) {
			v := make([]float32, e.Hidden)
			if x.id >= 0 {
				v = e.load(slots[e.home(x.id)][(t*e.seats()+x.seat)*e.elementBytes():][:e.elementBytes()])
			}
			if c.Address(rows) != 0 {
				e.store(kernel.UpdateAddress[uint8](c, e.row(rows, t*e.TopK+k), e.elementBytes()), v)
			}
			if x.id < 0 || weights == nil && x.again {
				continue
			}
			w := float32(1)
			if weights != nil {
				w = weights[t*e.TopK+k]
			}
			for i := range sum {
				sum[i] = dtype.FMA(w, v[i], sum[i])
			}
		}
		e.store(kernel.UpdateAddress[uint8](c, e.row(out, t), e.elementBytes()), sum)
	}
}

func (f *normFormat) dispatch(c *kernel.Call) {
	p, e := meet(c), f.expertsOf(c, rankParam, inParam+7)
	slots := map[int][]byte{}
	for k := 0; k < p.ranks && !p.over; k++ {
		slots[p.after(k)] = bytesOf(p.from(k, p.rank)[:p.slot])
	}
	e.sendTokens(inParam, inParam+3, slots, false)
	if p.barrier(0); !p.over {
		e.receiveTokens(e.slots(p), inParam+4)
	}
	p.leave()
}

func (f *normFormat) combine(c *kernel.Call) {
	p, e := meet(c), f.expertsOf(c, rankParam, inParam+6)
	if !p.over {
		e.sendRows(inParam, func(r int) []byte { return bytesOf(p.from((r-p.rank+p.ranks)%p.ranks, p.rank)[:p.slot]) })
	}
	if p.barrier(0); !p.over {
		e.receiveRows(e.slots(p), inParam+1)
	}
	p.leave()
}

func (f *normFormat) dispatchPack(c *kernel.Call) {
	e := f.expertsOf(c, 5, 7)
	e.sendTokens(0, 4, map[int][]byte{0: kernel.UpdateAddress[uint8](c, c.Address(3), e.DispatchBytes())}, true)
}

func (f *normFormat) dispatchReceive(c *kernel.Call) {
	e := f.expertsOf(c, 5, 7)
	e.receiveTokens(e.moved(e.DispatchBytes()), 2)
}

func (f *normFormat) combinePack(c *kernel.Call) {
	e := f.expertsOf(c, 4, 6)
	to, n := c.Address(2), int(kernel.Get[uint64](c, 3))
	e.sendRows(0, func(r int) []byte { return kernel.UpdateAddress[uint8](c, to+uint64(r*n), n) })
}

func (f *normFormat) combineReceive(c *kernel.Call) {
	e := f.expertsOf(c, 7, 9)
	e.receiveRows(e.moved(e.CombineBytes()), 2)
}
