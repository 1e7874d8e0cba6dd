package health

import (
	"bytes"
	"cmp"
	"context"
	"encoding/xml"
	"errors"
	"fmt"
	"io"
	"path"
	"slices"
	"strings"
)

var variables = &Check{
	ID: "variables", Scope: ScopeHost, Source: "environment, /etc/nccl.conf, NCCL_CONF_FILE or ~/.nccl.conf",
	Hazard: "A variable of NCCL or CUDA makes programs slow, or makes them fail.",
	Run:    checkVariables,
}

// A variableRule is a value that hurts. bad is nil if every value does.
type variableRule struct {
	name, cause string
	bad         func(value string) bool
}

func is(values ...string) func(string) bool {
	return func(v string) bool {
		return slices.ContainsFunc(values, func(w string) bool { return strings.EqualFold(v, w) })
	}
}

const (
	throughHost = "copies within a host pass through host memory or the network"
	notTuned    = "it replaces NCCL's choice, which fits the hardware"
)

var variableRules = []variableRule{
	{"NCCL_P2P_DISABLE", throughHost, is("1")},
	{"NCCL_P2P_LEVEL", throughHost, is("LOC", "0")},
	{"NCCL_SHM_DISABLE", "processes of a host without peer access use the network", is("1")},
	{"NCCL_IB_DISABLE", "hosts are connected by TCP instead of RDMA", nil},
	{"NCCL_NET", "hosts are connected by TCP instead of RDMA", is("Socket")},
	{"NCCL_NET_GDR_LEVEL", "the NIC does not read GPU memory", is("LOC", "0")},
	{"NCCL_ALGO", notTuned, nil},
	{"NCCL_PROTO", notTuned + "; LL128 corrupts data on hardware without support", nil},
	{"NCCL_BUFFSIZE", notTuned, nil},
	{"NCCL_NTHREADS", notTuned, nil},
	{"NCCL_MIN_NCHANNELS", notTuned, nil},
	{"NCCL_MAX_NCHANNELS", notTuned, nil},
	{"NCCL_MIN_CTAS", notTuned, nil},
	{"NCCL_MAX_CTAS", notTuned, nil},
	{"NCCL_LAUNCH_MODE", "one thread launches the kernels of all GPUs together", is("GROUP")},
	{"NCCL_CUMEM_ENABLE", "NCCL does not use memory that GPUs of other processes map", is("0")},
	{"NCCL_CHECK_POINTERS", "each call of NCCL checks its pointers, which costs time", is("1")},
	{"NCCL_DEBUG", "NCCL writes a line for each call", is("TRACE")},
	{"NCCL_IB_GID_INDEX", "the index differs between hosts; NCCL finds it", nil},
	{"NCCL_IB_TIMEOUT", "it hides lost packets; NCCL has a default", nil},
	{"NCCL_RAS_ENABLE", "chorus and ncclras cannot ask NCCL about a hang", is("0")},
	{"NCCL_NVLS_ENABLE", "NCCL's start fails if ranks share a GPU", is("1")},
	{"CUDA_LAUNCH_BLOCKING", "each launch waits for its end", is("1")},
	{"CUDA_INJECTION64_PATH", "a profiler is loaded into each process", nil},
	{"CUDA_DEVICE_WAITS_ON_EXCEPTION", "a faulty program stops instead of ending", is("1")},
	{"COMPUTE_PROFILE", "a profiler runs in each process", is("1")},
}

func checkVariables(_ context.Context, h *Host) []Result {
	all, err := h.ncclSettings()
	if err != nil {
		return []Result{unread(err)}
	}
	const want = "no such setting"
	var list []Result
	add := func(s setting, cause string) {
		list = append(list, warn(s.name+"="+s.value+" ("+s.place+")", want, cause, "remove "+s.name+" from "+s.place))
	}
	for _, r := range variableRules {
		s, ok := all[r.name]
		needsRDMA := r.name == "NCCL_IB_DISABLE" || r.name == "NCCL_NET"
		if !ok || r.bad != nil && !r.bad(s.value) || needsRDMA && (s.value == "0" || !h.hasRDMA()) {
			continue
		}
		add(s, r.cause)
	}
	if s, ok := all["NCCL_TOPO_FILE"]; ok {
		if text, err := h.readBytes(inRoot(s.value)); err != nil {
			add(s, "the file is not readable: "+rooted(err).Error())
		} else if err := checkTopology(text); err != nil {
			add(s, "NCCL cannot use the file: "+err.Error())
		}
	}
	if len(list) == 0 {
		return []Result{pass(want, want)}
	}
	return list
}

// checkTopology reports whether a file is a topology of NCCL: XML whose outermost element is <system version="1">.
func checkTopology(text []byte) error {
	d, depth, begun := xml.NewDecoder(bytes.NewReader(text)), 0, false
	for {
		token, err := d.Token()
		if err == io.EOF && !begun {
			return errors.New("it has no element <system>")
		} else if err == io.EOF {
			return nil
		} else if err != nil {
			return err
		}
		switch x := token.(type) {
		case xml.StartElement:
			if depth == 0 && x.Name.Local != "system" {
				return fmt.Errorf("its outermost element is <%s>: want <system>", x.Name.Local)
			}
			version := ""
			for _, a := range x.Attr {
				if a.Name.Local == "version" {
					version = a.Value
				}
			}
			if depth == 0 && version != "1" {
				return fmt.Errorf("the version of <system> is %q: want 1", version)
			}
			depth, begun = depth+1, true
		case xml.EndElement:
			depth--
		}
	}
}

// A setting is a variable with its place: the environment or a file.
type setting struct{ name, value, place string }

// ncclSettings returns the variables of NCCL and CUDA as NCCL reads them: the environment first,
// then the user's file, then the file of the host.
func (h *Host) ncclSettings() (map[string]setting, error) {
	all := map[string]setting{}
	files := []string{"/etc/nccl.conf", cmp.Or(h.getenv("NCCL_CONF_FILE"), path.Join("/", h.getenv("HOME"), ".nccl.conf"))}
	for _, file := range files {
		text, err := h.read(inRoot(file))
		if absent(err) {
			continue
		}
		if err != nil {
			return nil, err
		}
		for line := range strings.Lines(text) {
			name, value, ok := strings.Cut(line, "=")
			if name = strings.TrimSpace(name); ok && !strings.HasPrefix(name, "#") {
				all[name] = setting{name, strings.TrimSpace(value), file}
			}
		}
	}
	for name, value := range h.Env {
		if !strings.HasPrefix(name, "NCCL_") && !strings.HasPrefix(name, "CUDA_") && name != "COMPUTE_PROFILE" {
			continue
		}
		all[name] = setting{name, value, "the environment"}
	}
	return all, nil
}

// inRoot returns the name of an absolute path within Root.
func inRoot(file string) string {
	if p := strings.TrimPrefix(path.Clean("/"+file), "/"); p != "" {
		return p
	}
	return "."
}
