package comm

import "time"

// SetTimeout changes the timeout of the operations that this process issues from now on
// (torch's _set_pg_timeout). Operations that are already issued keep their timeout. d is as in
// nccl.Config.Timeout: 0 means CHORUS_NCCL_TIMEOUT, and a negative value no timeout. Use
// Batch.SetTimeout for single operations. SetTimeout enqueues nothing, may be called at any
// time, and does not affect groups of Split and Sub.
func (g *Group) SetTimeout(d time.Duration) error {
	if err := g.check("set timeout"); err != nil {
		return err
	}
	for i := range g.members {
		if err := g.members[i].comm.SetTimeout(d); err != nil {
			return err
		}
	}
	return nil
}
