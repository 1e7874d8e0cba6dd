package checkpoint

import "sync"

// A sequencer runs moves that follow each other: the next one begins when the one before
// has nothing left to begin, and while that comes to its end. Two at most are under way.
type sequencer struct {
	ended chan struct{} // closed by the last one
}

// run returns when the move has nothing left to begin, and those before it have ended.
func (r *sequencer) run(move func(spare func())) {
	begun, ended, before := make(chan struct{}), make(chan struct{}), r.ended
	spare := sync.OnceFunc(func() { close(begun) })
	go func() {
		defer close(ended)
		defer spare()
		move(spare)
	}()
	<-begun
	if before != nil {
		<-before
	}
	r.ended = ended
}

// wait returns when all have ended.
func (r *sequencer) wait() {
	if r.ended != nil {
		<-r.ended
	}
}
