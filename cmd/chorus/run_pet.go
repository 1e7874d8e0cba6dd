package main

import (
	"fmt"
	"net"
	"os"

	"github.com/spf13/cobra"

	"github.com/gochorus/chorus/internal/env"
	"github.com/gochorus/chorus/internal/launch"
)

// petFlags are the variables with which torchrun's flags can be set, and Kubeflow's torch policy
// sets nothing else.
var petFlags = []struct{ name, flag string }{
	{"PET_NNODES", "nnodes"}, {"PET_NPROC_PER_NODE", "nproc-per-node"}, {"PET_NODE_RANK", "node-rank"}, {"PET_MAX_RESTARTS", "max-restarts"},
}

// setPET sets the flags that the command line does not have to the values of torchrun's
// variables. Chorus's own variables precede them.
func (f *runFlags) setPET(cmd *cobra.Command) error {
	for _, p := range petFlags {
		value, ok := os.LookupEnv(p.name)
		if !ok || value == "" || cmd.Flags().Changed(p.flag) {
			continue
		}
		if p.flag == "nproc-per-node" && value == "gpu" {
			value = "auto"
		}
		err := cmd.Flags().Set(p.flag, value)
		if err == nil {
			err = f.check()
		}
		if err != nil {
			return &launch.UsageError{Reason: fmt.Sprintf("%s=%q: %v", p.name, value, err)}
		}
	}
	if host := os.Getenv("PET_MASTER_ADDR"); host != "" && len(f.seeds) == 0 && env.Seeds.Value() == "" && f.nnodes != "1" {
		if port := os.Getenv("PET_MASTER_PORT"); port != "" {
			host = net.JoinHostPort(host, port)
		}
		f.seeds = []string{host}
	}
	return nil
}

// check validates the numbers of hosts, processes and restarts.
func (f *runFlags) check() error {
	if _, _, err := f.nodes(); err != nil {
		return err
	}
	if _, err := f.procs(); err != nil {
		return err
	}
	if f.logFormat != "text" && f.logFormat != "json" {
		return &launch.UsageError{Reason: fmt.Sprintf("--log-format %s: want text or json", f.logFormat)}
	}
	if f.maxRestarts < 0 {
		return &launch.UsageError{Reason: fmt.Sprintf("--max-restarts %d: want 0 or more", f.maxRestarts)}
	}
	return nil
}
