package ddp

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"time"

	"github.com/gochorus/chorus/comm"
	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/collective"
	"github.com/gochorus/chorus/internal/gpu"
	"github.com/gochorus/chorus/internal/route"
	"github.com/gochorus/chorus/stream"
)

// Autotune lets a Reducer or Units try settings in the program's own first steps, and keep the one
// with the fastest steps. Measurements returns the times. PyTorch's
// DistributedDataParallel and fully_shard do not have this.
//
// The first 3 steps warm up. Then each setting runs Steps steps twice, the second time in the reverse order, so
// that a drift of the clocks cancels out. The step after a change is not measured. A step is timed by
// events on the streams of Finish, from the end of a Finish to the end of the next one, so the time includes everything
// that the program does in a step. The last Finish of these steps waits for them on all ranks, which exchange
// their times and choose the setting with the smallest median over all ranks. After that nothing changes: to
// measure again, close the Reducer and create another one.
//
// All ranks change at the same step, because a step counts when its reductions are enqueued and Finish or Join ends it, also
// with an error. In a group with comm.Config.Deterministic, and not OnRequest, all settings give the same bits. Otherwise the
// sums may be rounded differently from step to step. A graph cannot capture a step before the choice. If a rank
// cannot change, for example for lack of memory, its Finish returns the error, and groups of several processes
// are broken, so that no rank waits for it.
//
// Whichever group is in use, Finish, Join, Refresh and Close let the streams of the Reducer's own group wait for its work,
// so that these streams may be used as without Autotune then. In a graph, only the streams of its capture wait.
type Autotune struct {
	// Groups are further groups whose streams and communicators may reduce. They have the same ranks on the same devices, and the
	// same comm.Config.Deterministic, but another HighPriority, Strategy or NCCL.MaxCTAs (the number of
	// multiprocessors). comm.Join creates them, with the Session of the first group. Give them in the same order on all ranks; NewReducer and NewUnits refuse another one. Do not
	// use them otherwise before the choice. Afterwards those that were not chosen may be closed; the Reducer's
	// own group stays open. Default none.
	Groups []*comm.Group
	// BucketBytes are further values of ReducerConfig.BucketBytes, except those that give the same buckets. Default, also if
	// empty, a fourth and four times of it. To try only ReducerConfig.BucketBytes, give that value.
	BucketBytes []int
	// Prefetch are further values of UnitsConfig.Prefetch, except those that gather the same units. Default, also if empty, one
	// more, which takes the memory of another unit. To try only UnitsConfig.Prefetch, give that value.
	Prefetch []int
	// Steps is the number of steps that are measured at a time, at most 1,000. Units count each Finish as a step,
	// so choose a multiple of the passes whose gradients add up. Default 6.
	Steps int
}

// A Measurement is a setting that Autotune has tried.
type Measurement struct {
	Group       int           // 0: the group of the Reducer or the Units; i: Autotune.Groups[i-1]
	BucketBytes int           // of a Reducer
	Prefetch    int           // of Units
	Step        time.Duration // median of a step
}

// String describes the setting, such as "group 0, buckets of 26214400 bytes".
func (m Measurement) String() string {
	if m.BucketBytes > 0 {
		return fmt.Sprintf("group %d, buckets of %d bytes", m.Group, m.BucketBytes)
	}
	return fmt.Sprintf("group %d, a prefetch of %d units", m.Group, m.Prefetch)
}

// Measurements returns the settings that Autotune has tried, the fastest first, which is in use. It
// returns nil before the choice, and without Autotune.
func (r *Reducer) Measurements() []Measurement {
	if r == nil || r.queue == nil {
		return nil
	}
	return r.queue.trial.result()
}

// Measurements returns the settings that Autotune has tried, the fastest first, which is in use. It
// returns nil before the choice, and without Autotune.
func (u *Units[M, P]) Measurements() []Measurement {
	if u == nil || u.queue == nil {
		return nil
	}
	return u.queue.trial.result()
}

// check returns the error of wrong options.
func (a *Autotune) check(op string, g *comm.Group) error {
	if a == nil {
		return nil
	}
	if a.Steps < 0 || a.Steps > mostSteps {
		return refuse(op, "Autotune measures %d steps at a time: want 1 to %d, or 0 for the default", a.Steps, mostSteps)
	}
	if k := slices.IndexFunc(a.BucketBytes, func(n int) bool { return n <= 0 }); k >= 0 {
		return refuse(op, "Autotune tries buckets of %d bytes: want a positive size", a.BucketBytes[k])
	}
	if k := slices.IndexFunc(a.Prefetch, func(n int) bool { return n < 0 }); k >= 0 {
		return refuse(op, "Autotune tries a prefetch of %d units: want 0 or more", a.Prefetch[k])
	}
	for k, other := range a.Groups {
		if err := checkGroup(other, op); err != nil {
			return fmt.Errorf("%w (Autotune.Groups[%d])", err, k)
		}
		if other == g || slices.Index(a.Groups, other) < k {
			return refuse(op, "Autotune.Groups[%d] is given twice: want other groups than the first", k)
		}
		if why := unlike(g, other); why != "" {
			return refuse(op, "Autotune.Groups[%d] has %s: want the ranks, the devices and the order of the group itself", k, why)
		}
	}
	return nil
}

// unlike says why other cannot reduce instead of g, or returns "".
func unlike(g, other *comm.Group) string {
	if other.Size() != g.Size() || other.Locals() != g.Locals() {
		return fmt.Sprintf("%d ranks, of which %d are local, instead of %d and %d", other.Size(), other.Locals(), g.Size(), g.Locals())
	}
	for i := range g.Locals() {
		is, want := other.Communicator(i).Rank(), g.Communicator(i).Rank()
		if is != want || other.Device(i) != g.Device(i) {
			return fmt.Sprintf("rank %d on %s as local rank %d, instead of rank %d on %s", is, other.Device(i), i, want, g.Device(i))
		}
	}
	a, b := cmp.Or(g.Deterministic(), new(comm.Order)), cmp.Or(other.Deterministic(), new(comm.Order))
	if *a != *b || (g.Deterministic() == nil) != (other.Deterministic() == nil) {
		return "another comm.Config.Deterministic, so that the sums would depend on the choice"
	}
	return ""
}

// filled returns a copy with the defaults, for a Reducer with buckets of so many bytes or Units with a prefetch.
func (a *Autotune) filled(bytes, prefetch int) *Autotune {
	if a == nil {
		return nil
	}
	c := Autotune{slices.Clone(a.Groups), slices.Clone(a.BucketBytes), slices.Clone(a.Prefetch), cmp.Or(a.Steps, 6)}
	if len(c.BucketBytes) == 0 {
		c.BucketBytes = []int{max(bytes/4, 1), 4 * min(bytes, math.MaxInt/4)}
	}
	if len(c.Prefetch) == 0 {
		c.Prefetch = []int{prefetch + 1}
	}
	return &c
}

// describe describes the options, which are filled, to other ranks.
func (a *Autotune) describe(units bool) string {
	if a == nil {
		return ""
	}
	tried := fmt.Sprintf("buckets of %v bytes", a.BucketBytes)
	if units {
		tried = fmt.Sprintf("a prefetch of %v units", a.Prefetch)
	}
	return fmt.Sprintf(", with Autotune of %d further groups, %s and %d steps", len(a.Groups), tried, a.Steps)
}

// identities returns what tells each of the groups, which are valid, from the others, alike on all ranks.
func (a *Autotune) identities() (list []string) {
	if a != nil {
		for _, g := range a.Groups {
			list = append(list, collective.Of(g.Communicator(0)).Identity())
		}
	}
	return list
}

// settings returns the settings to try: each group with each value, the configured one first, but with one of those that are the same.
func (a *Autotune) settings(own int, others []int, same func(a, b int) bool, setting func(value int) Measurement) []Measurement {
	values := []int{own}
	for _, x := range others {
		if !slices.ContainsFunc(values, func(y int) bool { return same(x, y) }) {
			values = append(values, x)
		}
	}
	var all []Measurement
	for group := range len(a.Groups) + 1 {
		for _, x := range values {
			m := setting(x)
			m.Group = group
			all = append(all, m)
		}
	}
	return all
}

// checkAutotune checks the options of Autotune.
func (c *ReducerConfig) checkAutotune(op string, g *comm.Group) error {
	switch {
	case c.Autotune != nil && c.Hook != nil:
		return refuse(op, "Autotune with a hook, whose state belongs to buckets that Autotune replaces")
	case c.Autotune != nil && len(c.Autotune.Prefetch) > 0:
		return refuse(op, "Autotune tries a prefetch of %v units, which a Reducer does not have", c.Autotune.Prefetch)
	}
	return c.Autotune.check(op, g)
}

// settings returns the settings that Autotune tries.
func (r *Reducer) settings() []Measurement {
	order := backwards(len(r.grads[0]))
	same := func(a, b int) bool { return sameBuckets(r.split(order, a), r.split(order, b)) }
	return r.cfg.Autotune.settings(r.cfg.BucketBytes, r.cfg.Autotune.BucketBytes, same, func(n int) Measurement { return Measurement{BucketBytes: n} })
}

// change reduces by another group in other buckets from the next step on.
func (r *Reducer) change(g *comm.Group, m Measurement) error {
	g0, bytes := r.g, r.cfg.BucketBytes
	if err := r.orderBehind(g); err != nil {
		return err
	}
	r.g, r.queue.g, r.cfg.BucketBytes = g, g, m.BucketBytes
	err := r.arrange(r.order)
	if err != nil {
		r.g, r.queue.g, r.cfg.BucketBytes = g0, g0, bytes
	}
	return err
}

// orderBehind lets the streams of g use what the group's streams have used.
func (r *Reducer) orderBehind(g *comm.Group) error {
	if g == r.g {
		return nil
	}
	for i, on := range g.Streams() {
		errs := []error{on.WaitStream(r.g.Stream(i))}
		if x := r.used; x != nil {
			errs = append(errs, x.locals[i].own.RecordStream(on), x.all[i].RecordStream(on))
		}
		if x := r.uneven; x != nil {
			errs = append(errs, x.locals[i].no.RecordStream(on), x.locals[i].yes.RecordStream(on), x.active[i].RecordStream(on), x.factors[i].RecordStream(on))
		}
		if err := cmp.Or(errs...); err != nil {
			return err
		}
	}
	return nil
}

// settings returns the settings that Autotune tries, up to a prefetch of all
// other units, because a longer one gathers the same.
func (u *Units[M, P]) settings(a *Autotune, units int) []Measurement {
	same := func(a, b int) bool { return min(a, units-1) == min(b, units-1) }
	return a.settings(u.prefetch, a.Prefetch, same, func(n int) Measurement { return Measurement{Prefetch: n} })
}

// change gathers and reduces by another group, with another prefetch, from the next pass on.
func (u *Units[M, P]) change(g *comm.Group, m Measurement) error {
	if g != u.g {
		for i, on := range g.Streams() {
			l := &u.locals[i]
			var errs []error
			errs = append(errs, on.WaitStream(u.g.Stream(i)), l.params.RecordStream(on), l.copies.RecordStream(on))
			for k := range l.units {
				x := &l.units[k]
				errs = append(errs, x.whole.RecordStream(on), x.shard.RecordStream(on))
			}
			for k := range l.retired {
				errs = append(errs, l.retired[k].whole.RecordStream(on))
			}
			if err := cmp.Or(errs...); err != nil {
				return err
			}
		}
	}
	u.g, u.queue.g, u.prefetch = g, g, m.Prefetch
	return nil
}

// A trial runs steps with each setting in turn, and then with the fastest one.
type trial struct {
	groups   []*comm.Group
	settings []Measurement
	use      func(*comm.Group, Measurement) error // changes the setting between two steps; after an error the earlier one is in use
	plan     plan
	elapsed  func(step, local int) (time.Duration, error) // of a step after the first one that is not warm-up; tests replace it

	ended, handled int               // steps; all ranks count alike
	current        int               // setting
	marks          [][]*stream.Event // by step and local rank: the ends of the steps after the warm-up
	over           bool
	measured       []Measurement // the fastest first; nil before the choice
}

func newTrial(a *Autotune, g *comm.Group, settings []Measurement, use func(*comm.Group, Measurement) error) *trial {
	t := &trial{groups: append([]*comm.Group{g}, a.Groups...), settings: settings, use: use, plan: plan{len(settings), a.Steps}}
	t.elapsed = t.betweenMarks
	return t
}

func (t *trial) result() []Measurement {
	if t == nil {
		return nil
	}
	return slices.Clone(t.measured)
}

// refuseCapture returns an error if s is being captured. Launches of the graph would be steps that this
// process does not count.
func (t *trial) refuseCapture(op string, s *stream.Stream) error {
	if t == nil || t.over {
		return nil
	}
	return gpu.StreamOf(s).RefuseCapture(op, fmt.Sprintf("Autotune has not chosen a setting yet: capture after %d more steps, when Measurements is not nil",
		t.plan.end()-t.ended))
}

// advance is called at the end of each step, with a stream of each local rank that has waited for the
// reductions. It changes the setting, or chooses one, when it is time.
func (t *trial) advance(ctx context.Context, streams []*stream.Stream) error {
	if t == nil || t.over || t.handled == t.ended {
		return nil
	}
	t.handled = t.ended
	var errs []error
	if t.ended > warmUp {
		ends := make([]*stream.Event, len(streams))
		for i, s := range streams {
			var err error
			ends[i], err = s.Record(&stream.EventConfig{Timing: true})
			errs = append(errs, err) // the choice returns it, too
		}
		t.marks = append(t.marks, ends)
	}
	if t.ended == t.plan.end() {
		errs = append(errs, t.choose(ctx, streams))
	} else {
		errs = append(errs, t.change(t.plan.next(t.ended), streams))
	}
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("ddp: autotune: %w", err)
	}
	return nil
}

// change uses another setting from the next step on. The streams wait for what that needs, as a graph that begins with the next step does not.
func (t *trial) change(k int, streams []*stream.Stream) error {
	if k == t.current {
		return nil
	}
	from, to := t.groups[t.settings[t.current].Group], t.groups[t.settings[k].Group]
	err := t.checkOpen(to)
	if err == nil {
		err = t.use(to, t.settings[k])
	}
	for i, s := range streams {
		if err == nil {
			err = s.WaitStream(to.Stream(i))
		}
	}
	if err == nil {
		t.current = k
		return nil
	}
	t.over = true
	err = fmt.Errorf("rank %d cannot change to %v: %w", from.Rank(), t.settings[k], err)
	if _, closed := errors.AsType[*closedGroup](err); !closed {
		err = fmt.Errorf("%w: give the best known setting without Autotune", err)
	}
	if from.Locals() == from.Size() {
		return err
	}
	cause := err
	for _, g := range []*comm.Group{from, to} { // the other ranks have changed
		if t.checkOpen(g) == nil {
			err = errors.Join(err, route.GroupOf(g).Fail(cause))
		}
	}
	return err
}

// A closedGroup is the error of one of Autotune.Groups that the program has closed. It matches device.ErrClosed.
type closedGroup struct {
	k      int
	chosen bool
}

func (e *closedGroup) Error() string {
	if e.chosen {
		return fmt.Sprintf("the program closed Autotune.Groups[%d], which Autotune has chosen: close only the others", e.k)
	}
	return fmt.Sprintf("the program closed Autotune.Groups[%d] during the trial: keep it open until Measurements returns the choice", e.k)
}

func (e *closedGroup) Unwrap() error { return device.ErrClosed }

// checkOpen returns an error if g is one of Autotune.Groups and the program has closed it.
func (t *trial) checkOpen(g *comm.Group) error {
	if t == nil {
		return nil
	}
	if k := slices.Index(t.groups, g); k > 0 && errors.Is(route.GroupOf(g).Check("autotune"), device.ErrClosed) {
		return &closedGroup{k - 1, t.measured != nil && g == t.groups[t.settings[t.current].Group]}
	}
	return nil
}

// follow lets the streams of the first group wait for those of g, whose work they would have without Autotune. It
// leaves out streams of different captures: the launch of a graph is not ordered with the first group's streams.
func (t *trial) follow(g *comm.Group) error {
	if t == nil || t.groups[0] == g {
		return nil
	}
	for i, own := range t.groups[0].Streams() {
		of, err := gpu.StreamOf(g.Stream(i)).CaptureID()
		if err != nil {
			return err
		}
		id, err := gpu.StreamOf(own).CaptureID()
		if err == nil && id == of {
			err = own.WaitStream(g.Stream(i))
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// followClosing is follow for Close. It ignores an error of streams that are
// closed, because they have no pending work.
func (t *trial) followClosing(g *comm.Group) error {
	if err := t.follow(g); !errors.Is(err, device.ErrClosed) {
		return err
	}
	return nil
}

// choose waits for the steps on all ranks and uses the fastest setting, or after an error the configured one.
func (t *trial) choose(ctx context.Context, streams []*stream.Stream) error {
	t.over = true
	g := t.groups[t.settings[t.current].Group]
	times, failed := make([][][]time.Duration, g.Locals()), make([]error, g.Locals())
	for i := range times {
		times[i], failed[i] = t.times(ctx, i)
	}
	best := 0
	err := route.Agree(ctx, g, "choose a setting", times, failed, func(all []collective.Said[[][]time.Duration]) error {
		values := make([][][]time.Duration, len(all))
		for rank, x := range all {
			if x.Failed != "" {
				return fmt.Errorf("rank %d has no times: %s", rank, x.Failed)
			}
			if !t.plan.complete(x.Value) {
				return fmt.Errorf("rank %d has times of other steps", rank)
			}
			values[rank] = x.Value
		}
		for k, median := range medians(values) {
			if t.settings[k].Step = median; median < t.settings[best].Step {
				best = k
			}
		}
		t.measured = slices.Clone(t.settings)
		slices.SortStableFunc(t.measured, func(a, b Measurement) int { return cmp.Compare(a.Step, b.Step) })
		return nil
	})
	return errors.Join(err, t.close(), t.change(best, streams))
}

// times waits for the steps of a local rank and returns their durations, by setting.
func (t *trial) times(ctx context.Context, local int) ([][]time.Duration, error) {
	last := t.marks[len(t.marks)-1][local]
	if last == nil {
		return nil, errors.New("the end of the last step was not recorded")
	}
	if err := last.Sync(ctx); err != nil {
		return nil, err
	}
	all := make([][]time.Duration, len(t.settings))
	for x := 1; x < len(t.marks); x++ {
		if x%(t.plan.steps+1) == 0 { // the step before had another setting
			continue
		}
		d, err := t.elapsed(x, local)
		if err != nil {
			return nil, err
		}
		k := t.plan.setting(x / (t.plan.steps + 1))
		all[k] = append(all[k], d)
	}
	return all, nil
}

// betweenMarks returns the time between the ends of a step and of the one before.
func (t *trial) betweenMarks(step, local int) (time.Duration, error) {
	return t.marks[step][local].Elapsed(t.marks[step-1][local])
}

// close frees the events.
func (t *trial) close() error {
	if t == nil {
		return nil
	}
	var errs []error
	for _, ends := range t.marks {
		for _, e := range ends {
			errs = append(errs, e.Close())
		}
	}
	t.marks = nil
	return errors.Join(errs...)
}

// mostSteps is the limit of Autotune.Steps. More would not make a median better, and their times are kept.
const mostSteps = 1000

// warmUp is the number of first steps that are not measured.
const warmUp = 3

// A plan says which setting each step has. After the warm-up there are turns of one step more than are
// measured: one for each setting, and as many in the reverse order.
type plan struct{ settings, steps int }

// end is the number of steps before the choice.
func (p plan) end() int { return warmUp + 2*p.settings*(p.steps+1) }

// next returns the setting of the step that follows so many.
func (p plan) next(ended int) int {
	return p.setting(max(0, ended-warmUp) / (p.steps + 1))
}

// setting returns the setting of a turn.
func (p plan) setting(turn int) int { return min(turn, 2*p.settings-1-turn) }

// complete reports whether a rank has the times of all steps.
func (p plan) complete(times [][]time.Duration) bool {
	return len(times) == p.settings && !slices.ContainsFunc(times, func(ds []time.Duration) bool { return len(ds) != 2*p.steps })
}

// medians returns the median time of each setting over all ranks and steps,
// from times by rank and setting.
func medians(times [][][]time.Duration) []time.Duration {
	all := make([]time.Duration, len(times[0]))
	for k := range all {
		var ds []time.Duration
		for _, rank := range times {
			ds = append(ds, rank[k]...)
		}
		slices.Sort(ds)
		all[k] = ds[len(ds)/2]
	}
	return all
}
