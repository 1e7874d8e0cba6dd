package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"log"
	"math"
	"slices"
	"strings"
	"time"

	"github.com/gochorus/chorus/comm"
	"github.com/gochorus/chorus/ddp"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/nccl"
	"github.com/gochorus/chorus/rng"
	"github.com/gochorus/chorus/stream"
	"github.com/gochorus/chorus/tensor"
)

// layersMain measures data-parallel training of linear layers: the milliseconds of a step
// without and with the reduction of its gradients, each the median of some rounds. A step is the
// forward and the backward pass of a chain of layers with square weights in bfloat16, without an
// optimizer. Every rank prints whether its reduced gradients are the same as those of rank 0.
// With -beside, steps without reduction are measured while all-reduces of other memory run all the time, instead of with reduction.
// With -sharded the weights and their gradients are sharded, each layer by itself, and the largest amount of memory
// in use is printed, too. With -autotune, the same steps follow once more with ddp.Autotune, which chooses the
// size of buckets, or the prefetch, and the group, among those of -also. All settings are printed, the fastest first.
//
//	chorus run --nproc-per-node 2 -- bench layers -tokens 1024
//
// testdata/layers.py measures the same of PyTorch's DistributedDataParallel and fully_shard.
func layersMain() {
	log.SetPrefix("layers: ")
	var m model
	flag.IntVar(&m.tokens, "tokens", 1024, "rows of the input of each rank")
	flag.IntVar(&m.width, "width", 4096, "`elements` of a row")
	flag.IntVar(&m.depth, "layers", 24, "number of layers")
	flag.IntVar(&m.rounds, "rounds", 9, "rounds of which the median is printed")
	flag.IntVar(&m.steps, "steps", 10, "steps of a round")
	flag.BoolVar(&m.sharded, "sharded", false, "shard the weights")
	flag.BoolVar(&m.priority, "high-priority", false, "give the group's streams precedence")
	flag.IntVar(&m.blocks, "ctas", 0, "`number` of thread blocks that a collective may have; 0 is its choice")
	flag.IntVar(&m.others, "beside", 0, "`bytes` of all-reduces that run beside steps without reduction")
	flag.IntVar(&m.carveout, "carveout", 0, "`number` of multiprocessors that products of the backward pass leave to collectives")
	flag.BoolVar(&m.autotune, "autotune", false, "measure also with the settings that ddp chooses by the first steps")
	flag.Func("also", "`groups` that -autotune tries too, such as copy-engines,nccl/ctas=4/high-priority: a strategy, the number of thread blocks and the priority of each", m.parseGroups)
	flag.Parse()
	if m.also != nil && !m.autotune {
		log.Fatal("-also names groups for -autotune: give both")
	}
	if m.autotune && m.others > 0 {
		log.Fatal("-beside measures steps without reduction, which -autotune does not have: give one of them")
	}
	if m.carveout > 0 {
		settings, err := tensor.MatMulDefaults()
		if err != nil {
			log.Fatal(err)
		}
		settings.SMCarveout = m.carveout
		m.beside = &tensor.MatMulConfig{Settings: &settings}
	}
	if err := m.run(context.Background()); err != nil {
		log.Fatal(err)
	}
}

// A model is a rank's copy of the layers.
type model struct {
	tokens, width, depth, rounds, steps int
	sharded, priority                   bool
	blocks, carveout, others            int
	beside                              *tensor.MatMulConfig // of products that run beside collectives
	autotune                            bool
	also                                []comm.Config // of groups that ddp may choose
	names                               []string      // of these groups

	g       *comm.Group
	s       *stream.Stream
	weights []tensor.Tensor // [out, in]
	grads   []tensor.Tensor
	inputs  []tensor.Tensor  // of each layer, and the output of the last one
	dy      tensor.Tensor    // gradient of the output
	dx      [2]tensor.Tensor // gradients of a layer's input, in turns
}

func (m *model) run(ctx context.Context) (err error) {
	cfg := comm.Config{HighPriority: m.priority}
	if m.blocks > 0 {
		cfg.NCCL = &nccl.Config{MaxCTAs: &m.blocks}
	}
	m.g, err = comm.Init(ctx, &comm.InitConfig{Group: &cfg, Fallback: func(note string) { log.Print(note) }})
	if err != nil {
		return err
	}
	defer m.g.Close()
	// The group's stream reduces; the model has a stream for itself, as in torch.
	if m.s, err = stream.New(m.g.Device(0), nil); err != nil {
		return err
	}
	defer m.s.Close()
	if m.sharded {
		if err := m.runSharded(ctx); err != nil {
			return err
		}
		return m.g.Shutdown(ctx)
	}
	flat, parts, err := memory.MakeFlat[memory.BFloat16Bits](m.s, slices.Repeat([]int{m.width * m.width}, m.depth)...)
	if err != nil {
		return err
	}
	defer flat.Close()
	if err := m.allocate(parts); err != nil {
		return err
	}
	if err := m.measure(ctx, "without reduction", func() error { return m.step(nil) }); err != nil {
		return err
	}
	if m.others > 0 {
		return m.measureBeside(ctx)
	}
	reduced := func(name string, cfg *ddp.ReducerConfig) error {
		r, err := ddp.NewReducer(m.g, [][]memory.Slice[memory.BFloat16Bits]{parts}, cfg)
		if err != nil {
			return err
		}
		defer r.Close()
		step := func() error { return m.step(r) }
		if err := m.choose(cfg != nil, step, r.Measurements); err != nil {
			return err
		}
		if err := m.measure(ctx, name, step); err != nil {
			return err
		}
		return m.check(ctx, flat)
	}
	if err := reduced("with reduction", nil); err != nil {
		return err
	}
	if m.autotune {
		a, err := m.tuning(ctx)
		if err != nil {
			return err
		}
		defer closeAll(a.Groups)
		if err := reduced("with reduction as chosen", &ddp.ReducerConfig{Autotune: a}); err != nil {
			return err
		}
		if err := shutdownAll(ctx, a.Groups); err != nil {
			return err
		}
	}
	return m.g.Shutdown(ctx)
}

// parseGroups parses the flag -also.
func (m *model) parseGroups(text string) error {
	for _, group := range strings.Split(text, ",") {
		parts := strings.Split(group, "/")
		c := comm.Config{Strategy: comm.Strategy(parts[0])}
		for _, part := range parts[1:] {
			var n int
			if part == "high-priority" {
				c.HighPriority = true
			} else if _, err := fmt.Sscanf(part, "ctas=%d", &n); err == nil && n > 0 {
				c.NCCL = &nccl.Config{MaxCTAs: &n}
			} else {
				return fmt.Errorf("%q in %q: want ctas=NUMBER or high-priority", part, group)
			}
		}
		m.also, m.names = append(m.also, c), append(m.names, group)
	}
	return nil
}

// tuning opens the groups of -also.
func (m *model) tuning(ctx context.Context) (*ddp.Autotune, error) {
	a := &ddp.Autotune{}
	for i := range m.also {
		g, err := comm.Join(ctx, m.g.Session(), m.g.Device(0), &m.also[i])
		if err != nil {
			return nil, errors.Join(err, closeAll(a.Groups))
		}
		a.Groups = append(a.Groups, g)
		if want := m.also[i].Strategy; g.Strategy() != want {
			log.Printf("%s: the devices do not support %s: the group uses %s", m.names[i], want, g.Strategy())
		}
	}
	return a, nil
}

func closeAll(groups []*comm.Group) (err error) {
	for _, g := range groups {
		err = errors.Join(err, g.Close())
	}
	return err
}

func shutdownAll(ctx context.Context, groups []*comm.Group) (err error) {
	for _, g := range groups {
		err = errors.Join(err, g.Shutdown(ctx))
	}
	return err
}

// choose runs steps until ddp has chosen a setting, and prints the times of all.
func (m *model) choose(autotune bool, step func() error, measurements func() []ddp.Measurement) error {
	for autotune && measurements() == nil {
		if err := step(); err != nil {
			return err
		}
	}
	for _, x := range measurements() {
		if m.g.Rank() == 0 {
			name := "its own"
			if x.Group > 0 {
				name = m.names[x.Group-1]
			}
			fmt.Printf("%v (%s): %.3f ms a step\n", x, name, float64(x.Step)/1e6)
		}
	}
	return nil
}

// draw returns a tensor of normal random numbers.
func (m *model) draw(seed uint64, std float64, shape ...int) (tensor.Tensor, error) {
	x, err := memory.Make[memory.BFloat16Bits](m.s, shape[0]*shape[1])
	if err != nil {
		return tensor.Tensor{}, err
	}
	if err := rng.Normal(rng.New(m.g.Device(0), seed), m.s, x, 0., std); err != nil {
		return tensor.Tensor{}, err
	}
	return tensor.Of(x, shape...)
}

// allocate draws the weights, equal on all ranks, and the input.
func (m *model) allocate(parts []memory.Slice[memory.BFloat16Bits]) error {
	for i := range m.depth {
		w, err := m.draw(uint64(i), 1/math.Sqrt(float64(m.width)), m.width, m.width)
		if err != nil {
			return err
		}
		grad, err := tensor.Of(parts[i], m.width, m.width)
		if err != nil {
			return err
		}
		m.weights, m.grads = append(m.weights, w), append(m.grads, grad)
	}
	return m.input()
}

// input draws the input, which differs between ranks, and allocates the outputs and their gradients.
func (m *model) input() error {
	for i := range m.depth + 4 {
		x, err := m.draw(uint64(1000*(m.g.Rank()+1)+i), 1, m.tokens, m.width)
		if err != nil {
			return err
		}
		m.inputs = append(m.inputs, x)
	}
	m.dy, m.dx = m.inputs[m.depth+1], [2]tensor.Tensor(m.inputs[m.depth+2:])
	m.inputs = m.inputs[:m.depth+1]
	return nil
}

// step runs the forward and the backward pass, and reduces the gradients unless r is nil.
func (m *model) step(r *ddp.Reducer) error {
	for i, w := range m.weights {
		if err := tensor.MatMul(m.s, m.inputs[i+1], m.inputs[i], w.T(), nil); err != nil {
			return err
		}
	}
	dy := m.dy
	for i := m.depth - 1; i >= 0; i-- {
		if err := tensor.MatMul(m.s, m.grads[i], dy.T(), m.inputs[i], m.beside); err != nil {
			return err
		}
		if r != nil {
			if err := r.Ready(m.s, i); err != nil {
				return err
			}
		}
		if i > 0 { // the input of the model needs no gradient
			dx := m.dx[i%2]
			if err := tensor.MatMul(m.s, dx, dy, m.weights[i], m.beside); err != nil {
				return err
			}
			dy = dx
		}
	}
	if r == nil {
		return nil
	}
	return r.Finish(m.s)
}

// runSharded measures steps with sharded weights, and prints the largest amount of memory in use.
func (m *model) runSharded(ctx context.Context) error {
	cfg := &ddp.UnitsConfig{Keep: []int{m.depth - 1}}
	if err := m.measureSharded(ctx, "sharded", cfg); err != nil || !m.autotune {
		return err
	}
	a, err := m.tuning(ctx)
	if err != nil {
		return err
	}
	defer closeAll(a.Groups)
	cfg.Autotune = a
	if err := m.measureSharded(ctx, "sharded as chosen", cfg); err != nil {
		return err
	}
	return shutdownAll(ctx, a.Groups)
}

func (m *model) measureSharded(ctx context.Context, name string, cfg *ddp.UnitsConfig) error {
	u, err := ddp.NewUnits[memory.BFloat16Bits, memory.BFloat16Bits](m.g, slices.Repeat([][]int{{m.width * m.width}}, m.depth), cfg)
	if err != nil {
		return err
	}
	defer u.Close()
	if err := m.s.WaitStream(m.g.Stream(0)); err != nil { // which clears the shards
		return err
	}
	shard := u.Shard(0)
	if err := rng.Normal(rng.New(m.g.Device(0), uint64(m.g.Rank())), m.s, shard, 0., 1/math.Sqrt(float64(m.width))); err != nil {
		return err
	}
	x, err := m.draw(uint64(1000*(m.g.Rank()+1)), 1, m.tokens, m.width)
	if err != nil {
		return err
	}
	defer x.Close()
	if m.dy, err = m.draw(uint64(1000*(m.g.Rank()+1)+1), 1, m.tokens, m.width); err != nil {
		return err
	}
	defer m.dy.Close()
	m.inputs = []tensor.Tensor{x}
	if err := u.Refresh(m.s); err != nil {
		return err
	}
	step := func() error { return m.shardedStep(u) }
	if err := m.choose(cfg.Autotune != nil, step, u.Measurements); err != nil {
		return err
	}
	if err := memory.ResetPeakStats(m.g.Device(0)); err != nil {
		return err
	}
	if err := m.measure(ctx, name, step); err != nil {
		return err
	}
	most, err := memory.MaxAllocated(m.g.Device(0))
	if err != nil {
		return err
	}
	if m.g.Rank() == 0 {
		fmt.Printf("largest amount of memory in use: %.3f GB\n", float64(most)/1e9)
	}
	return nil
}

// shardedStep is step with sharded weights, whose gradients it always reduces. It allocates the outputs of
// layers, and frees each when the backward pass has used it, as torch does.
func (m *model) shardedStep(u *ddp.Units[memory.BFloat16Bits, memory.BFloat16Bits]) error {
	var errs []error
	square := func(x memory.Slice[memory.BFloat16Bits]) tensor.Tensor {
		w, err := tensor.Of(x, m.width, m.width)
		errs = append(errs, err)
		return w
	}
	rows := func() (tensor.Tensor, error) { return tensor.Make(m.s, memory.BFloat16, m.tokens, m.width) }
	xs := m.inputs[:1] // of each layer, and the output of the last one
	for i := range m.depth {
		w, err := u.Use(m.s, i)
		if err != nil {
			return err
		}
		y, err := rows()
		if err != nil {
			return err
		}
		if err := errors.Join(tensor.MatMul(m.s, y, xs[i], square(w[0]).T(), nil), u.Done(m.s, i)); err != nil {
			return err
		}
		xs = append(xs, y)
	}
	dy := m.dy
	for i := m.depth - 1; i >= 0; i-- {
		w, err := u.Use(m.s, i)
		if err != nil {
			return err
		}
		grad, err := u.Grads(m.s, i)
		if err != nil {
			return err
		}
		if err := errors.Join(tensor.MatMul(m.s, square(grad[0]), dy.T(), xs[i], m.beside), u.Ready(m.s, i)); err != nil {
			return err
		}
		if i > 0 {
			dx, err := rows()
			if err != nil {
				return err
			}
			if err := errors.Join(tensor.MatMul(m.s, dx, dy, square(w[0]), m.beside), xs[i].Close()); err != nil {
				return err
			}
			if i < m.depth-1 {
				errs = append(errs, dy.Close())
			}
			dy = dx
		}
		if err := u.Done(m.s, i); err != nil {
			return err
		}
	}
	errs = append(errs, xs[m.depth].Close())
	if m.depth > 1 {
		errs = append(errs, dy.Close())
	}
	return errors.Join(append(errs, u.Finish(m.s), u.Refresh(m.s))...)
}

// measure prints the median milliseconds of a step.
func (m *model) measure(ctx context.Context, name string, step func() error) error {
	var ms []float64
	for round := range m.rounds + 1 { // the first one warms up
		if err := errors.Join(m.s.Sync(ctx), m.g.Barrier(ctx)); err != nil {
			return err
		}
		begun := time.Now()
		for range m.steps {
			if err := step(); err != nil {
				return err
			}
		}
		if err := m.s.Sync(ctx); err != nil {
			return err
		}
		if round > 0 {
			ms = append(ms, float64(time.Since(begun))/1e6/float64(m.steps))
		}
	}
	slices.Sort(ms)
	if m.g.Rank() == 0 {
		fmt.Printf("%d ranks, %d layers of %d, %d tokens, %s: %.3f ms a step\n", m.g.Size(), m.depth, m.width, m.tokens, name, ms[len(ms)/2])
	}
	return nil
}

// measureBeside prints the median milliseconds of a step while all-reduces run on the group's stream.
func (m *model) measureBeside(ctx context.Context) error {
	s := m.g.Stream(0)
	x, err := memory.Make[memory.BFloat16Bits](s, m.others/2)
	if err != nil {
		return err
	}
	defer x.Close()
	if err := x.Zero(s); err != nil {
		return err
	}
	var each time.Duration
	for range 2 { // the first round warms up
		if err := m.g.Barrier(ctx); err != nil {
			return err
		}
		begun := time.Now()
		ends, err := m.reduceMany(ctx, x, 100)
		each = time.Since(begun) / 100
		for _, e := range ends {
			err = errors.Join(err, e.Close())
		}
		if err != nil {
			return err
		}
	}
	var alone, beside, reduced []float64
	for round := range 2 * m.rounds {
		if err := errors.Join(m.s.Sync(ctx), m.g.Barrier(ctx)); err != nil {
			return err
		}
		type result struct {
			ends []*stream.Event
			err  error
		}
		reductions := make(chan result, 1)
		if round%2 == 0 {
			reductions <- result{}
		} else { // for twice as long as the steps take alone
			n := int(2*alone[len(alone)-1]*1e6*float64(m.steps)/float64(each)) + 1
			if err := comm.BroadcastValue(ctx, m.g, 0, &n, comm.JSON); err != nil {
				return err
			}
			go func() {
				ends, err := m.reduceMany(ctx, x, n)
				reductions <- result{ends, err}
			}()
		}
		ms, n, err := m.stepsBeside(ctx, func() ([]*stream.Event, error) { r := <-reductions; return r.ends, r.err })
		if err != nil {
			return err
		}
		if round%2 == 0 {
			alone = append(alone, ms)
		} else {
			beside = append(beside, ms)
			reduced = append(reduced, float64(n)*float64(each)/1e6/(ms*float64(m.steps)))
		}
	}
	slices.Sort(alone)
	slices.Sort(beside)
	slices.Sort(reduced)
	if m.g.Rank() == 0 {
		fmt.Printf("%d tokens: a step takes %.3f ms alone, and %.3f beside all-reduces of %d bytes, which take %.1f µs alone and ended at %.2f of that rate\n",
			m.tokens, alone[len(alone)/2], beside[len(beside)/2], m.others, float64(each)/1e3, reduced[len(reduced)/2])
	}
	return m.g.Shutdown(ctx)
}

// stepsBeside returns the milliseconds of a step, and how many of the all-reduces, whose ends reductions returns, ended during the steps.
func (m *model) stepsBeside(ctx context.Context, reductions func() ([]*stream.Event, error)) (ms float64, n int, err error) {
	begin, err := m.s.Record(&stream.EventConfig{Timing: true})
	if err != nil {
		return 0, 0, err
	}
	defer begin.Close()
	begun := time.Now()
	for range m.steps {
		if err := m.step(nil); err != nil {
			return 0, 0, err
		}
	}
	end, err := m.s.Record(&stream.EventConfig{Timing: true})
	if err != nil {
		return 0, 0, err
	}
	defer end.Close()
	if err := m.s.Sync(ctx); err != nil {
		return 0, 0, err
	}
	ms = float64(time.Since(begun)) / 1e6 / float64(m.steps)
	ends, err := reductions()
	ended, err2 := endedBetween(ends, begin, end)
	return ms, ended, errors.Join(err, err2)
}

// reduceMany enqueues n all-reduces, of which at most 40 are in progress, and waits for them. It returns the events of their ends,
// which the caller closes, also after an error.
func (m *model) reduceMany(ctx context.Context, x memory.Slice[memory.BFloat16Bits], n int) (ends []*stream.Event, err error) {
	s := m.g.Stream(0)
	for i := range n {
		if i >= 40 {
			if err := ends[i-40].Sync(ctx); err != nil {
				return ends, err
			}
		}
		if err := comm.AllReduce(m.g, comm.Sum, x); err != nil {
			return ends, err
		}
		e, err := s.Record(&stream.EventConfig{Timing: true})
		if err != nil {
			return ends, err
		}
		ends = append(ends, e)
	}
	return ends, s.Sync(ctx)
}

// endedBetween returns how many of the events ended between two others, and closes them.
func endedBetween(ends []*stream.Event, begin, end *stream.Event) (n int, err error) {
	for _, e := range ends {
		after, err2 := e.Elapsed(begin)
		before, err3 := end.Elapsed(e)
		if err = errors.Join(err, err2, err3, e.Close()); after >= 0 && before >= 0 {
			n++
		}
	}
	return n, err
}

// check compares the reduced gradients with rank 0's: all ranks must have the same bits.
func (m *model) check(ctx context.Context, flat memory.Slice[memory.BFloat16Bits]) error {
	mine := make([]memory.BFloat16Bits, flat.Len())
	if err := flat.CopyTo(m.s, mine); err != nil {
		return err
	}
	if err := m.g.Between([]*stream.Stream{m.s}, func() error { return comm.BroadcastFrom(m.g, 0, flat) }); err != nil {
		return err
	}
	if err := m.g.Wait(ctx); err != nil {
		return err
	}
	first := make([]memory.BFloat16Bits, flat.Len())
	if err := flat.CopyTo(m.s, first); err != nil {
		return err
	}
	different, zeros := 0, 0
	for i, x := range mine {
		if x != first[i] {
			different++
		}
		if x == 0 {
			zeros++
		}
	}
	if different > 0 || zeros > len(mine)/2 {
		return fmt.Errorf("rank %d: %d of %d reduced gradients differ from rank 0's, %d are zero", m.g.Rank(), different, len(mine), zeros)
	}
	return nil
}
