// Package cluster connects the processes of a job, assigns ranks, provides a small
// shared store, and reports the loss of a process.
//
// A training process attaches to its job and communicates with the others:
//
//	sess, err := cluster.Attach(ctx) // chorus run, torchrun, Slurm, MPI or Kubernetes
//	if err != nil {
//		return err
//	}
//	defer sess.Close()
//	if sess.Rank() == 0 {
//		err = sess.Set(ctx, "id", id)
//	}
//	id, err := sess.Get(ctx, "id")       // waits until rank 0 has set it
//	<-sess.Context().Done()              // cancelled when a process is lost:
//	cause := context.Cause(sess.Context()) // a *MemberLostError with process and reason
//
// One coordinator holds the authoritative state. Under `chorus run` it runs in the
// launcher (an [Agent]), otherwise in the process of rank 0. Each process has one
// authenticated and encrypted TCP connection to it. After a reset or an outage that is
// shorter than CHORUS_LOST_AFTER it connects again, and no call is lost or repeated.
// Between the hosts of a job, gossip by memberlist helps to find the coordinator and to
// explain a loss. Gossip makes no decisions, and a job on one host does not use it.
//
// A world has a fixed size and one epoch: it is not formed again after a loss.
// Each message carries the epoch, so that a later version can change this.
//
// All methods of [Session] and [Agent] are safe for concurrent use. Calls that wait
// for other processes take a context; a context without a deadline is limited to
// CHORUS_CALL_TIMEOUT. Close leaves the job immediately, and the other processes do
// not see it as a failure. A process that exits without Close or Shutdown is lost.
package cluster
