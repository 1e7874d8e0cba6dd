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
// launcher, otherwise in the process of rank 0. Each process has one
// authenticated and encrypted TCP connection to it. After a reset or an outage that is
// shorter than CHORUS_LOST_AFTER it connects again, and no call is lost or repeated.
// Between the hosts of a job, gossip by memberlist helps to find the coordinator and to
// explain a loss. Gossip decides nothing, and a job on one host does not use it.
//
// A world of Attach has a fixed size and ends with its first loss. `chorus run
// --max-restarts N` then starts all processes again.
//
// # Members that come and go
//
// Without a launcher, one process may serve a registry ([Serve]) for processes that come, leave and return ([Enlist]). It begins
// worlds of chosen members ([Registry.Begin]), and [Enlistment.World] returns the session of each in its members, or
// comm.JoinEnlisted its group. Several worlds
// run side by side at one port, with common members or without. A loss ends the worlds of the lost member and no others, in contrast to
// the epochs of [Run], where it ends the step of all. If the process with the registry ends, all of its worlds end.
// vLLM's StatelessProcessGroup is such a world of chosen processes; it has no list and reports no losses.
//
// # Elastic jobs
//
// A program that calls [Run] instead keeps its processes when others are lost, join or leave:
//
//	var weights memory.Slice[float32] // the state lives as long as the process
//	steps := int64(-1)                // no state yet
//	err := cluster.Run(ctx, nil, func(ctx context.Context, w *cluster.World) error {
//		g, err := comm.Join(ctx, w, dev, nil) // the group of this epoch
//		if err != nil {
//			return err
//		}
//		defer g.Close()
//		from, err := comm.SyncState(ctx, g, steps, &steps, weights.AsBytes())
//		if err != nil {
//			return err // new ranks receive the state of the most advanced rank
//		}
//		if from < 0 {
//			... // no rank has a state: initialise it, alike on all ranks
//			steps = 0
//		}
//		for steps < 1000 {
//			if err := w.Step(); err != nil {
//				return errors.Join(err, g.Shutdown(ctx)) // all ranks leave after the same step
//			}
//			... // one step, then g.Wait(ctx), then the update of the state
//			steps++
//		}
//		return g.Shutdown(ctx)
//	})
//
// The time between two changes of the world is an epoch. It ends in one of two ways:
//   - A process is lost. The context of the epoch ends with a [*MemberLostError], its group is
//     aborted, and the function returns. The step in progress is lost.
//   - Processes join, or a host leaves. Then [World.Step] returns a [*ChangeError] on all
//     ranks after the same number of steps, and no step is lost.
//
// The next epoch begins when the function has returned in all survivors, so that their operations of two
// epochs never overlap. A process that is cut off from the coordinator may run on in the old epoch until it notices the
// silence, after about CHORUS_LOST_AFTER, and its function returns; see [World.Fence]. Survivors keep the order of their ranks, and new ranks follow. Each
// epoch has an empty store. [World.New] and [World.Left] describe the change.
//
// Change the state only after Group.Wait has returned nil for the step: then the state of
// each survivor is valid, and survivors differ by at most one step. LocalRank does not
// change while a process lives, so that the device stays the same.
//
// If all processes of an epoch are lost and started again, no rank has a state in the next epoch, as in the first one.
// Then comm.SyncState returns -1, and the program must initialise its memory or load a checkpoint.
//
// The group of the next epoch has other streams. An update that was enqueued on the old group's stream, and work that was aborted,
// may still use the state when the function returns. Wait for it, or order the next epoch's work after it, as comm.Group.Close describes.
//
// The coordinator tells the launchers to start lost workers again, at most
// --max-restarts times in the whole job, with a growing delay for each worker. Without
// restarts the job goes on with the survivors, if at least MIN hosts of --nnodes and
// RunConfig.MinSize processes remain. A process that does not return in time is killed, and the next epoch waits up to 2 s
// for its exit. With `chorus run --nnodes MIN:MAX`, hosts
// join while the job runs. SIGTERM to one launcher drains its host: all ranks finish the step, and the job
// goes on without the host. If the launcher coordinates, another one does so from then on.
//
// A host is excluded if its processes fail four times in a row within ten times CHORUS_BACKOFF of
// their start, and the job has enough other hosts. The first exclusion takes thirty times
// CHORUS_BACKOFF. Each further failure doubles the time. All launchers print the host, the number
// of failures and the time.
//
// # Loss of the coordinator
//
// If the coordinator's host is lost in an elastic job on several hosts, the other launchers
// choose another coordinator, and the next epoch begins there. Surviving processes are not
// started again. Each epoch has an empty store, so that nothing else than the store of the
// lost epoch is lost: keep the state of the program in its memory. Epoch numbers only grow.
//
// A part of a split network goes on only if it has more than half of the hosts of the last
// epoch, or half of them with the coordinator. Only hosts that have answered count, also those whose
// workers have exited. The other part ends with a [*MemberLostError] that
// says so. Hosts whose launchers are known to have ended do not count: the kernel of such a host
// refuses connections to the launcher's port, or another launcher of the job has it. This must be found within CHORUS_LOST_AFTER
// of a time at which the launcher has heard from the finder. A host still counts if its launcher ends
// while the coordinator is silent or has ended, and no other one has been chosen. It may have agreed to an epoch of which the others do
// not know. Therefore a job with --nnodes 1:2 goes on
// when the launcher of either host is killed. If the coordinator of two hosts becomes silent, for example because it loses its
// power, the other host waits for it for twice CHORUS_LOST_AFTER and 4 s, and ends then. It cannot know whether the
// coordinator goes on.
//
// Each choice of a coordinator raises the term. Launchers follow only terms that are at least the greatest
// that they know, and a coordinator that meets a greater one ends, so that at most one goes on.
//
// # When a job goes on
//
// This table is about elastic jobs on several hosts. "The others" are the hosts that are not affected. The step in
// progress and the store of the epoch are lost with each change that is not planned.
//
//	fault                               assumption                       result
//	worker exits, is killed or stops    restarts or MinSize permit it    the next epoch, without it or with its successor
//	too few workers or hosts are left   fewer than MAX hosts are here    the job waits for others for CHORUS_JOIN_TIMEOUT, and says
//	for MIN or MinSize, or none                                          so every 5 s; then it ends with the last loss
//	worker exits with 0 in an epoch     others are left                  the next epoch, without it; it is not started again
//	launcher is killed                  its kernel runs                  the others go on, also if it was one of two, or coordinated
//	coordinator's launcher and others   more than half of the other      the others go on; if fewer are left, the job ends, because a
//	are killed within a moment          hosts are left, or half of them  launcher may have coordinated after the first one's end and
//	                                    with the next coordinator        before its own
//	coordinator is silent, and another  more than half of all hosts      the others go on; if fewer are left, such as 2 of 4, the job
//	launcher is killed before the next  are left, such as 3 of 5         ends, because both still count: the killed one may have agreed
//	one is chosen                                                        to an epoch of the silent one
//	host is lost, drained or stopped    all functions have returned nil  the job has succeeded; what processes of the others do
//	at the end of the program                                            after Run is not disturbed
//	host is cut off at that time        it is back within LOST_AFTER     it learns that the job has succeeded: launchers that know it
//	                                    and 2 s                          wait so long for hosts that are lost and have not ended
//	host vanishes, no coordinator       half of the hosts are left       the others go on after LOST_AFTER
//	host of the coordinator vanishes    more than half are left          the others go on after LOST_AFTER and about 0.2 s
//	coordinator and others vanish       more than half are left          as above, whichever they are
//	host of the coordinator vanishes    two hosts                        the job ends after 3 LOST_AFTER and 4 s
//	network splits                      one part has more than half, or  that part goes on, the other ends and says why
//	                                    half with the coordinator
//	network splits into small parts     none has half                    the job ends
//	the coordinator proposes an epoch   half of that epoch's hosts are   the job ends, because the epoch may have begun
//	to few hosts, and then vanishes     left without it
//	packets are lost in one direction   as for a split                   the hosts that hear each other go on
//	some hosts and the coordinator      they meet again within           they register with it again and join the
//	lose each other for silence, and    LOST_AFTER and 4 s               next epoch; their processes go on
//	the others go on with it
//	nobody hears the coordinator        more than half are left          the others go on after LOST_AFTER and about 0.3 s
//	the coordinator hears nobody        more than half are left          the others go on after twice LOST_AFTER and about 0.3 s
//	virtual machine freezes             its clock goes on                as for a host that vanishes; it ends when it continues
//	connections are reset               nobody refuses connections in    as for a split: resets and dropped packets
//	                                    the name of a host that lives    prove nothing
//	outage shorter than LOST_AFTER      less than 80 % of it             no effect
//	launcher stops (SIGSTOP)            several hosts                    as for a host that vanishes; its workers end the epoch
//	SIGTERM to launchers                MIN hosts are left               planned change: no step is lost
//	coordinator is lost at the end      all launchers have heard of it   the job has succeeded
//	restart is ordered, then the        one launcher that heard of it    the restart counts once
//	coordinator is lost                 votes
//
// A worker that exits with 0 has succeeded, as with torchrun, even in the middle of an epoch and without returning from Run.
// The job may still end with 0: exit with another code if the work is not done.
//
// When a launcher is killed by SIGKILL, the kernel kills its workers, and the launcher's guardian kills the rest of their process
// groups. Processes that have left the group of their worker, for example by setsid, go on. End them before the host is used again,
// or start the launcher as the first process of a container or as a service of systemd, which end all processes.
//
// A firewall that refuses connections in both directions, in the name of hosts that live, breaks the
// assumption: each side would count the other as ended. Let firewalls drop packets between the hosts of a job.
//
// The hosts need a path to each other: to the port of a seed, and to the gossip port of another
// host, or to any port without gossip. Newcomers find the job through a seed that is running. The
// coordinator tells seeds that start again where the job is.
//
// Limits: a coordinator that loses hosts one after the other, because it hears only a few of them, may give up some
// before it ends. The job then ends, too, if the hosts of its last proposal are not enough without it.
// If the job is not elastic, SIGTERM to the coordinator's launcher stops it. Hosts do not vote at the start: if
// they start while the network is cut between the seeds, and each part has MIN hosts, each part
// runs a separate job. One seed excludes this. A seed that starts again while it cannot reach the
// hosts of its old job begins another job if MIN hosts are with it.
//
// All methods of [Session] are safe for concurrent use. Calls that wait
// for other processes take a context; a context without a deadline is limited to
// CHORUS_CALL_TIMEOUT. Close leaves the job immediately, and the other processes do
// not see it as a failure. A process that exits without Close or Shutdown is lost.
package cluster
