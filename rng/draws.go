package rng

import (
	"fmt"

	"github.com/gochorus/chorus/kernel"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
)

// The advances of torch's generator for fills with a parameter in device memory, whatever their
// length. torch rounds the second from 10 up to a multiple of 4.
const (
	poissonAdvance   = 20
	bernoulliAdvance = 12
)

// Poisson fills x with Poisson-distributed counts (torch.poisson). If the rate of an element is
// negative or NaN, which stops the device in torch, its value is NaN.
func Poisson[T Float, R Param[T]](g *Generator, s *stream.Stream, x memory.Slice[T], rate R) error {
	const op = "rng: poisson"
	r := paramOf[T](rate)
	if !r.isSlice() && !(r.number >= 0) {
		return refuse("poisson", "rate", r.number, ">= 0")
	}
	if !r.isSlice() { // torch's rates have the type of the result
		r.number = formatOf[T]().round(r.number)
	}
	return fillBy(op, "poisson_kernel", g, s, x, &r, "rate", poissonAdvance)
}

func bernoulliOf[T Number | bool](g *Generator, s *stream.Stream, x memory.Slice[T], p param) error {
	return fillBy("rng: bernoulli", "bernoulli_kernel", g, s, x, &p, "p", bernoulliAdvance)
}

// fillBy performs a fill by a kernel of draws.cu with one parameter.
func fillBy[T memory.Element](op, name string, g *Generator, s *stream.Stream, x memory.Slice[T], p *param, what string, advance uint64) error {
	g, err := check(op, g, s, x)
	if err != nil {
		return err
	}
	if err := p.check(op, what, regionOf("the filled slice", x), true, s.Device()); err != nil || x.Len() == 0 {
		return err
	}
	l, err := launcherOf[T](op, s, drawsModule)
	if err != nil {
		return err
	}
	at, err := g.draw(s, advance)
	if err != nil {
		return fmt.Errorf("%s: %w", op, err)
	}
	return l.each(name, x.Len(), kernel.Ptr(x), count(x.Len()), kernel.Scalar(at.seed), kernel.Scalar(at.offset), at.launch,
		p.at, kernel.Scalar(p.number), p.type32(), kernel.Scalar(p.step()))
}

// normalOf is Normal with a slice as mean or std. Like torch, it draws values with mean 0 and
// multiplies and adds afterwards, and rounds each time.
func normalOf[T Float](g *Generator, s *stream.Stream, x memory.Slice[T], mean, std param) error {
	const op = "rng: normal"
	g, err := check(op, g, s, x)
	if err != nil {
		return err
	}
	out := regionOf("the filled slice", x)
	if err := mean.check(op, "mean", out, false, s.Device()); err != nil {
		return err
	}
	if err := std.check(op, "std", out, false, s.Device()); err != nil || x.Len() == 0 {
		return err
	}
	l, err := launcherOf[T](op, s, drawsModule)
	if err != nil {
		return err
	}
	spread := 1.0
	if !std.isSlice() {
		spread = std.number
	}
	if err := run(g, s, x, normal, number(0), number(spread), 0); err != nil {
		return err
	}
	mean.number = formatOf[T]().round(mean.number)
	return l.each("normal_kernel", x.Len(), kernel.Ptr(x), count(x.Len()),
		mean.at, kernel.Scalar(mean.number), mean.type32(), kernel.Scalar(mean.step()),
		std.at, kernel.Scalar(std.number), std.type32(), kernel.Scalar(std.step()))
}
