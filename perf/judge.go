package perf

import (
	"fmt"
	"math"
	"slices"
	"strings"
)

// Limits decide what is slow. A field that is 0 means the usual limit on GPUs, and no limit on virtual devices,
// whose times say nothing. All are bandwidths in 10^9 bytes a second, except Product and Part.
type Limits struct {
	// AllReduce is the lowest bus bandwidth of the largest all-reduce. By default it is 0.65 of the link of the
	// product, or 0.5 for two ranks, and there is no limit for unknown products, for several hosts, and below 64 MiB.
	AllReduce float64
	// Pair is the lowest bandwidth of a transfer in each direction, while both ranks send. Default: no limit.
	Pair float64
	// HostCopy is the lowest bandwidth of a copy of pinned memory from or to the GPU. Default: no limit.
	HostCopy float64
	// Product is the lowest rate of a matrix product in 10^12 operations a second. Default: no limit.
	Product float64
	// Part is the part of the speed of the others that a GPU or a pair must reach. Others are GPUs of the same
	// product, and pairs with the same kind of link: within a host, or between hosts. Default: 0.75.
	Part float64
}

// Check reports which limit is not usable.
func (l *Limits) Check() error {
	for _, x := range []struct {
		name  string
		value float64
	}{{"all-reduce", l.AllReduce}, {"pair", l.Pair}, {"host copy", l.HostCopy}, {"product", l.Product}, {"part", l.Part}} {
		if !(x.value >= 0) || math.IsInf(x.value, 0) {
			return fmt.Errorf("the limit of %s is %v: want a number that is 0 or larger", x.name, x.value)
		}
	}
	if l.Part > 1 {
		return fmt.Errorf("the part of the others' speed is %v: want at most 1", l.Part)
	}
	return nil
}

// defaultPart is below the spread between the links of one host, and above the loss by one of several links.
const defaultPart = 0.75

// withDefaults returns the limits for measurements on GPUs.
func (l Limits) withDefaults(gpus []GPU, maxBytes int) Limits {
	if l.Part == 0 {
		l.Part = defaultPart
	}
	oneHost := !slices.ContainsFunc(gpus, func(g GPU) bool { return g.Host != gpus[0].Host })
	if l.AllReduce == 0 && oneHost && maxBytes >= largeBytes {
		link := math.Inf(1)
		for _, g := range gpus {
			link = min(link, LinkOf(g.Product))
		}
		l.AllReduce = expected(len(gpus)) * link
	}
	return l
}

// A Kind is what is wrong.
type Kind string

// The kinds of findings.
const (
	Wrong  Kind = "wrong"  // data arrives wrong, or a result is wrong
	Slow   Kind = "slow"   // slower than a limit, or than the others
	Hang   Kind = "hang"   // not finished within the limit of a step
	Broken Kind = "broken" // a call failed, a device is lost, a process did not answer
)

// A Finding says what is wrong, and which GPUs or hosts it is about.
type Finding struct {
	Kind     Kind     `json:"kind"`
	Step     string   `json:"step"`            // devices, pairs, all-reduce or group
	GPUs     []GPU    `json:"gpus,omitempty"`  // one: this GPU; two: the link between them; none: the group, or Hosts
	Hosts    []string `json:"hosts,omitempty"` // the hosts, if all their GPUs are affected alike
	Measured float64  `json:"measured,omitempty"`
	Limit    float64  `json:"limit,omitempty"`
	Reason   string   `json:"reason"`
	Cure     string   `json:"cure,omitempty"`
}

// judgeDevices compares the tests of single devices.
func judgeDevices(gpus []GPU, devices []DeviceResult, l Limits) (list []Finding) {
	for i, d := range devices {
		on := gpus[i : i+1]
		add := func(k Kind, cure, format string, args ...any) {
			list = append(list, Finding{Kind: k, Step: "devices", GPUs: on, Reason: on[0].String() + ": " + fmt.Sprintf(format, args...), Cure: cure})
		}
		switch {
		case d.Hang != "":
			add(Hang, "end all programs on the GPU and reset it (nvidia-smi -r); restart the host if that fails", "%s did not finish", d.Hang)
			continue
		case d.Error != "":
			add(Broken, "chorus doctor --only xid,recovery-action,ecc", "%s", d.Error)
			continue
		}
		const memoryCure = "drain the host and reset the GPU; if it comes again, replace the GPU"
		if d.MemoryWrong > 0 {
			add(Wrong, memoryCure, "%d of %d bytes of its memory have another value than the one written", d.MemoryWrong, d.MemoryBytes)
		}
		if d.ToWrong > 0 {
			add(Wrong, "chorus doctor --only pcie,iommu-acs", "%d bytes that were copied from the host arrived wrong", d.ToWrong)
		}
		if d.FromWrong > 0 {
			add(Wrong, "chorus doctor --only pcie,iommu-acs", "%d bytes that were copied to the host arrived wrong", d.FromWrong)
		}
		if d.ProductWrong > 0 {
			add(Wrong, memoryCure, "%d rows of a matrix product differ from the reference", d.ProductWrong)
		}
	}
	for _, q := range []struct {
		what, cure string
		limit      float64
		of         func(*DeviceResult) float64
	}{
		{"copies from the host reach %.3g GB/s", "chorus doctor --only pcie,numa", l.HostCopy, func(d *DeviceResult) float64 { return d.ToGPU }},
		{"copies to the host reach %.3g GB/s", "chorus doctor --only pcie,numa", l.HostCopy, func(d *DeviceResult) float64 { return d.FromGPU }},
		{"a matrix product reaches %.3g TFLOP/s", "chorus doctor --only clocks,power-limit,other-processes", l.Product, func(d *DeviceResult) float64 { return d.Product }},
	} {
		for i, limit := range deviceLimits(gpus, devices, q.limit, l.Part, q.of) {
			if v := q.of(&devices[i]); v > 0 && v < limit {
				list = append(list, Finding{Kind: Slow, Step: "devices", GPUs: gpus[i : i+1], Measured: v, Limit: limit, Cure: q.cure,
					Reason: fmt.Sprintf("%s: "+q.what+", want %.3g", gpus[i], v, limit)})
			}
		}
	}
	return list
}

// deviceLimits returns the lowest speed for each device: an absolute limit, or a part of the fastest device of the
// same product.
func deviceLimits(gpus []GPU, devices []DeviceResult, limit, part float64, of func(*DeviceResult) float64) []float64 {
	best := map[string]float64{}
	for i := range devices {
		best[gpus[i].Product] = max(best[gpus[i].Product], of(&devices[i]))
	}
	list := make([]float64, len(devices))
	for i := range devices {
		list[i] = max(limit, part*best[gpus[i].Product])
	}
	return list
}

// judgePairs finds the GPU, the host or the link behind bad pairs.
func judgePairs(gpus []GPU, pairs []PairResult, l Limits) (list []Finding) {
	wrong := func(p *PairResult) bool { return p.Wrong[0]+p.Wrong[1] > 0 }
	for _, b := range blame(gpus, pairs, wrong) {
		count := int64(0)
		for _, p := range b.pairs {
			count += p.Wrong[0] + p.Wrong[1]
		}
		f := Finding{Kind: Wrong, Step: "pairs", GPUs: b.gpus, Hosts: b.hosts, Cure: "chorus doctor --only nvlink,pcie,iommu-acs,xid; until then leave it out of jobs"}
		f.Reason = fmt.Sprintf("%s: %d elements arrived wrong in %s", b.name(), count, b.share())
		list = append(list, f)
	}
	for _, across := range []bool{false, true} {
		var class []PairResult
		for _, p := range pairs {
			if (gpus[p.Ranks[0]].Host != gpus[p.Ranks[1]].Host) == across && p.Bandwidth > 0 {
				class = append(class, p)
			}
		}
		limit := max(l.Pair, l.Part*reference(class))
		slow := func(p *PairResult) bool { return p.Bandwidth < limit }
		for _, b := range blame(gpus, class, slow) {
			f := Finding{Kind: Slow, Step: "pairs", GPUs: b.gpus, Hosts: b.hosts, Limit: limit, Cure: "chorus doctor --only nvlink,pcie,clocks,iommu-acs"}
			if across {
				f.Cure = "chorus doctor --only rdma-port,gdr,mtu,ifname on the named hosts"
			}
			f.Measured = math.Inf(1)
			for _, p := range b.pairs {
				f.Measured = min(f.Measured, p.Bandwidth)
			}
			f.Reason = fmt.Sprintf("%s: %s, down to %.3g GB/s, want %.3g", b.name(), b.share(), f.Measured, limit)
			list = append(list, f)
		}
	}
	return list
}

// reference returns the bandwidth that healthy pairs reach: the upper quartile, because a single slow GPU slows
// down half of the pairs of four GPUs.
func reference(pairs []PairResult) float64 {
	if len(pairs) == 0 {
		return 0
	}
	all := make([]float64, len(pairs))
	for i, p := range pairs {
		all[i] = p.Bandwidth
	}
	return quantile(all, 0.75)
}

// A culprit explains bad pairs: a GPU or a host whose pairs are all bad, or the link of one pair.
type culprit struct {
	gpus  []GPU
	hosts []string
	pairs []PairResult // the bad ones that it explains
	of    int          // pairs that it has
}

func (b *culprit) name() string {
	switch {
	case len(b.hosts) > 0:
		return "host " + strings.Join(b.hosts, " and host ")
	case len(b.gpus) == 2:
		return fmt.Sprintf("the link between %s and %s", b.gpus[0], b.gpus[1])
	case len(b.gpus) == 1:
		return b.gpus[0].String()
	}
	return "all ranks"
}

func (b *culprit) share() string {
	if len(b.pairs) == 1 && b.of == 1 {
		return "its transfer"
	}
	return fmt.Sprintf("%d of its %d pairs", len(b.pairs), b.of)
}

// blame explains bad pairs by as few culprits as possible. If all pairs of all
// ranks are bad, it blames the group. It blames a host or a GPU if all its
// pairs are bad and it has several, and otherwise links.
func blame(gpus []GPU, pairs []PairResult, bad func(*PairResult) bool) (list []culprit) {
	var rest []PairResult
	for i := range pairs {
		if bad(&pairs[i]) {
			rest = append(rest, pairs[i])
		}
	}
	if len(rest) == 0 {
		return nil
	}
	if len(rest) == len(pairs) && len(pairs) > 1 {
		all := culprit{pairs: rest, of: len(pairs)}
		if hosts := hostsOf(gpus); len(hosts) == 2 && gpus[rest[0].Ranks[0]].Host != gpus[rest[0].Ranks[1]].Host {
			all.hosts = hosts // either may be the reason
		}
		return []culprit{all}
	}
	take := func(has func(*PairResult) bool, b culprit) bool {
		mine := slices.DeleteFunc(slices.Clone(pairs), func(p PairResult) bool { return !has(&p) })
		left := slices.DeleteFunc(slices.Clone(rest), func(p PairResult) bool { return !has(&p) })
		allBad := !slices.ContainsFunc(mine, func(p PairResult) bool { return !bad(&p) })
		if len(mine) < 2 || len(left) == 0 || !allBad {
			return false
		}
		b.pairs, b.of = left, len(mine)
		list = append(list, b)
		rest = slices.DeleteFunc(rest, func(p PairResult) bool { return has(&p) })
		return true
	}
	for _, host := range hostsOf(gpus) {
		take(func(p *PairResult) bool {
			a, b := gpus[p.Ranks[0]].Host, gpus[p.Ranks[1]].Host
			return a != b && (a == host || b == host)
		}, culprit{hosts: []string{host}})
	}
	for rank := range gpus {
		take(func(p *PairResult) bool { return p.Ranks[0] == rank || p.Ranks[1] == rank }, culprit{gpus: gpus[rank : rank+1]})
	}
	for _, p := range rest {
		list = append(list, culprit{gpus: []GPU{gpus[p.Ranks[0]], gpus[p.Ranks[1]]}, pairs: []PairResult{p}, of: 1})
	}
	return list
}

// hostsOf returns the names of the hosts, sorted by their first rank.
func hostsOf(gpus []GPU) (list []string) {
	for _, g := range gpus {
		if !slices.Contains(list, g.Host) {
			list = append(list, g.Host)
		}
	}
	return list
}

// judgeAllReduce finds wrong results, and a bandwidth below the limit.
func judgeAllReduce(gpus []GPU, r *Report, l Limits) (list []Finding) {
	wrong := make([]int64, len(gpus))
	all := int64(0)
	for _, row := range r.Rows {
		for _, m := range row.Sides() {
			for rank, x := range m.Ranks {
				wrong[rank] += x.Wrong
				all += x.Wrong
			}
		}
	}
	const cure = "do not trust results of this group; leave the named GPUs out and check again"
	if all > 0 && !slices.Contains(wrong, 0) {
		list = append(list, Finding{Kind: Wrong, Step: "all-reduce", Measured: float64(all), Cure: cure,
			Reason: fmt.Sprintf("%d elements of the all-reduce are wrong, on all ranks", all)})
	} else {
		for rank, n := range wrong {
			if n > 0 {
				list = append(list, Finding{Kind: Wrong, Step: "all-reduce", GPUs: gpus[rank : rank+1], Measured: float64(n), Cure: cure,
					Reason: fmt.Sprintf("%s: %d elements of the all-reduce are wrong, while %d ranks have right ones", gpus[rank], n, len(gpus)-count(wrong))})
			}
		}
	}
	best, largest := 0.0, 0
	for _, row := range r.Rows {
		for _, m := range row.Sides() {
			if row.Bytes > largest {
				best, largest = 0, row.Bytes
			}
			best = max(best, m.BusBW)
		}
	}
	if largest > 0 && best < l.AllReduce {
		list = append(list, Finding{Kind: Slow, Step: "all-reduce", Measured: best, Limit: l.AllReduce, Cure: "if no pair and no GPU is slow: chorus doctor, and other programs on the GPUs or in the network",
			Reason: fmt.Sprintf("the all-reduce of %d bytes over all %d ranks reaches %.3g GB/s, want %.3g", largest, len(gpus), best, l.AllReduce)})
	}
	return list
}

// count returns the numbers that are not 0.
func count(list []int64) (n int) {
	for _, x := range list {
		if x != 0 {
			n++
		}
	}
	return n
}
