// Package cluster finds the processes of a job, gives them ranks, keeps a
// small store that they share, and says when one of them is lost.
//
// A training process asks where it stands and meets the others:
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
//	<-sess.Context().Done()              // ends when a process is lost:
//	cause := context.Cause(sess.Context()) // a *MemberLostError says which and why
//
// One coordinator knows the truth: it lives in the launcher (an [Agent]) under
// `chorus run`, and otherwise in the process of rank 0. Every process holds one
// authenticated, encrypted TCP connection to it. Between the hosts of a job
// memberlist's gossip helps to find the coordinator and to explain a loss; it
// decides nothing, and a job on one host has none.
//
// A world has a fixed size and one epoch: it is never formed again after a
// loss. Every message carries the epoch, so that this can change.
//
// All methods of [Session] and [Agent] may be called from several goroutines
// at once. What waits for others takes a context; a context without a deadline
// gets CHORUS_CALL_TIMEOUT. Close leaves the job at once and is no failure to
// the others; a process that ends without Close or Shutdown is lost.
package cluster
