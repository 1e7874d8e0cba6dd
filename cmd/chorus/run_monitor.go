package main

import (
	"context"
	"fmt"
	"net"

	"github.com/gochorus/chorus/cluster"
	"github.com/gochorus/chorus/cmd/chorus/internal/monitor"
)

// monitored serves the state of a job: to chorus status always, and as metrics and a page at addr
// unless it is empty. It does so at once, so that chorus status finds a job whose hosts join. The
// result is called when all hosts have joined.
func monitored(ctx context.Context, addr string, source *monitor.Source, exits *monitor.Exits, say func(level, text string)) (func(*cluster.Agent) func(), error) {
	var metrics net.Listener
	if addr != "" {
		ln, public, err := monitor.Listen(ctx, addr)
		if err != nil {
			return nil, usage(err)
		}
		metrics = ln
		say("INFO", fmt.Sprintf("metrics and a page of the job: http://%s/", ln.Addr()))
		if public {
			say("WARN", fmt.Sprintf("warning: everyone who reaches %s can read the names of hosts and groups, and the progress and memory of the job", ln.Addr()))
		}
	}
	s := monitor.NewServer(source, monitor.Labels{Version: version(), Exits: exits})
	if local, err := monitor.ListenLocal(); err != nil {
		say("WARN", fmt.Sprintf("chorus status will not find this job: %v", err))
	} else {
		s.Serve(local, nil)
	}
	if metrics != nil {
		s.Serve(metrics, monitor.TrustedHosts(addr))
	}
	return func(a *cluster.Agent) func() {
		source.Join(a)
		return func() { _ = s.Close() } // the process ends
	}, nil
}
