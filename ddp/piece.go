package ddp

// A Piece is the run of a parameter's elements that a rank's shard has. The shard of a rank has
// at most one run of each parameter. Gradients and the optimiser's state have the same layout.
type Piece struct {
	Param int // the number of the parameter
	Start int // the first element of the parameter
	Len   int // elements
	At    int // the first element in the shard
}

// Pieces returns the elements of parameters that the shard of a local rank has, by At. The padding
// has no piece. An optimiser with a parameter for each piece has a state that a checkpoint
// stores by the names of the whole parameters, so that any number of ranks can load it. A
// parameter without elements has no piece.
func (sh *Sharder[T]) Pieces(local int) []Piece {
	var all []Piece
	rank := sh.queue.rank(local)
	for k := len(sh.spans) - 1; k >= 0; k-- {
		b, sp := &sh.queue.buckets[k], &sh.spans[k]
		for j, i := range b.grads {
			at, end := b.at[j], b.at[j]+sh.locals[local].params[i].Len() // in the bucket
			from, to := max(at, rank*sp.part), min(end, (rank+1)*sp.part)
			if from < to {
				all = append(all, Piece{Param: i, Start: from - at, Len: to - from, At: sp.at/sh.g.Size() + from - rank*sp.part})
			}
		}
	}
	return all
}
