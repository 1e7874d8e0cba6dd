package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"time"

	"github.com/gochorus/chorus/cluster"
	"github.com/gochorus/chorus/cmd/chorus/internal/doctor"
	"github.com/gochorus/chorus/internal/plain"
)

const (
	readTime     = 4500 * time.Millisecond // limit of all checks that only read
	exchangeTime = 30 * time.Second        // limit of the exchanges between hosts
)

// A visit is the part of one process in the check of all hosts of a job. A process alone is a job
// of one host.
type visit struct {
	*doctorFlags
	m      *member
	store  *cluster.Store
	nodes  []string // names of the hosts by node
	checks []*doctor.Check
	host   *doctor.Host // nil unless this process has local rank 0
}

// findings are the message of one host to rank 0.
type findings struct {
	Results []doctor.Result
	Facts   *doctor.Facts
}

// run checks this host, and in a job all hosts. Rank 0 prints.
func (f *doctorFlags) run(ctx context.Context, out io.Writer) error {
	sess, err := cluster.Attach(ctx)
	if err != nil {
		return err
	}
	defer sess.Close()
	v := &visit{doctorFlags: f, m: &member{Session: sess}, store: sess.Prefix("doctor"), nodes: hostNames(sess.Members())}
	if err := v.prepare(); err != nil {
		return err
	}
	report, err := v.examine(ctx)
	if err != nil {
		return err
	}
	if report != nil {
		err = f.print(out, report)
	}
	return errors.Join(err, sess.Shutdown(ctx))
}

// hostNames returns a name for each node. Two agents on one machine get different names.
func hostNames(members []cluster.Member) []string {
	var list []string
	for _, m := range members {
		for m.Node >= len(list) {
			list = append(list, "")
		}
		list[m.Node] = m.Host
	}
	for i, name := range list {
		if slices.Index(list, name) < i {
			list[i] = fmt.Sprintf("%s/%d", name, i)
		}
	}
	return list
}

// prepare selects the checks and opens the host.
func (v *visit) prepare() (err error) {
	v.Job = len(v.nodes) > 1
	if v.checks, err = v.Select(doctor.Checks); err != nil {
		return usage(err)
	}
	if v.m.LocalRank() != 0 {
		return nil
	}
	if v.host, err = doctor.NewHost(); err != nil {
		return err
	}
	if v.m.Size() == 1 {
		v.nodes = []string{v.host.Name}
	} else {
		v.host.Name, v.host.Ranks = v.nodes[v.m.Node()], v.m.LocalSize()
	}
	return nil
}

// examine runs the checks. It returns the report on rank 0, and nil on the others.
func (v *visit) examine(ctx context.Context) (*doctor.Report, error) {
	if v.host != nil {
		if err := v.read(ctx); err != nil {
			return nil, err
		}
	}
	var report *doctor.Report
	if v.m.isFirst() {
		var err error
		if report, err = v.collect(ctx); err != nil {
			return nil, err
		}
	}
	if v.Measure {
		if err := v.measure(ctx, report); err != nil {
			return nil, err
		}
	}
	if report != nil {
		report.Counts = doctor.Count(report.Results)
	}
	return report, nil
}

// read checks this host without loading it, and sends the findings.
func (v *visit) read(ctx context.Context) error {
	limited, cancel := context.WithTimeout(ctx, readTime)
	defer cancel()
	reads := slices.DeleteFunc(slices.Clone(v.checks), func(c *doctor.Check) bool { return c.Measures })
	mine := findings{Results: doctor.Run(limited, v.host, reads)}
	if v.Job {
		mine.Facts = v.host.Facts(limited, reads)
		exchanging, cancel := context.WithTimeout(ctx, exchangeTime)
		defer cancel()
		doctor.Exchange(exchanging, v.store, v.host, mine.Facts, v.m.Node(), len(v.nodes))
	}
	if err := ctx.Err(); err != nil { // interrupted: the results are not complete
		return err
	}
	text, err := json.Marshal(mine)
	if err != nil {
		return err
	}
	return v.store.Set(ctx, resultsKey(v.m.Node()), text)
}

func resultsKey(node int) string { return fmt.Sprintf("results/%d", node) }

// collect returns the findings of all hosts.
func (v *visit) collect(ctx context.Context) (*doctor.Report, error) {
	r := &doctor.Report{Version: version(), Hosts: v.nodes}
	var facts []*doctor.Facts
	for node, name := range v.nodes {
		text, err := v.store.Get(ctx, resultsKey(node))
		if err != nil {
			return nil, err
		}
		var one findings
		if err := json.Unmarshal(text, &one); err != nil {
			return nil, fmt.Errorf("the results of host %s: %w", name, err)
		}
		plain.Record(&one.Results)
		r.Results, facts = append(r.Results, one.Results...), append(facts, one.Facts)
	}
	if v.Job {
		r.Results = append(r.Results, doctor.Compare(v.checks, facts)...)
	}
	return r, nil
}

// measure measures all GPUs together, unless the results of rank 0 have a reason against it.
func (v *visit) measure(ctx context.Context, report *doctor.Report) error {
	if report != nil {
		if err := v.store.Set(ctx, "measure", []byte(doctor.CanMeasure(report.Results))); err != nil {
			return err
		}
	}
	refusal, err := v.store.Get(ctx, "measure")
	if err != nil {
		return err
	}
	measured := notMeasured(string(refusal))
	if len(refusal) == 0 {
		measured = v.m.measured(ctx)
	}
	if report != nil {
		v.host.Measured = measured
		loads := slices.DeleteFunc(slices.Clone(v.checks), func(c *doctor.Check) bool { return !c.Measures })
		report.Results = append(report.Results, doctor.Run(ctx, v.host, loads)...)
	}
	return ctx.Err()
}
