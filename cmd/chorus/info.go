package main

import (
	"errors"
	"fmt"
	"io"
	"runtime"
	"runtime/debug"
	"strings"
	"text/tabwriter"

	"github.com/spf13/cobra"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/env"
	"github.com/gochorus/chorus/internal/gpu"
	"github.com/gochorus/chorus/internal/launch"
	"github.com/gochorus/chorus/internal/ncclapi"
)

func newInfoCommand() *cobra.Command {
	var asJSON bool
	c := &cobra.Command{
		Use:   "info",
		Short: "Show the devices, the loaded libraries, and the links between devices",
		Long: `Show the devices with their sensor readings, the versions of the driver, CUDA and
NCCL, the path of each loaded library, and the pairs of devices with direct access to
each other's memory. Known defects of the loaded NCCL follow, with what Chorus does
about them. Without a GPU it shows the virtual devices and says so.`,
		Args: noArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			sys, note, err := device.OrVirtual()
			if err != nil {
				return err
			}
			r, err := inspect(sys, note)
			if err != nil {
				return err
			}
			if asJSON {
				return encode(c.OutOrStdout(), r)
			}
			return r.print(c.OutOrStdout())
		},
	}
	c.Flags().BoolVar(&asJSON, "json", false, "output in JSON")
	return c
}

// A report is the output of chorus info.
type report struct {
	Backend   string        `json:"backend"`
	Note      string        `json:"note,omitempty"`
	Devices   []deviceInfo  `json:"devices"`
	Libraries []libraryInfo `json:"libraries"`
	Defects   []defectInfo  `json:"nccl_defects"` // of the loaded NCCL
	Topology  [][]string    `json:"topology"`     // [i][j]: how i reaches j
}

type defectInfo struct {
	ID       string `json:"id"`
	Versions string `json:"versions"`
	Fault    string `json:"fault"`
	When     string `json:"when"`
	Chorus   string `json:"chorus"` // what Chorus does about it
	Open     bool   `json:"open"`   // a program can meet it all the same
	Source   string `json:"source"`
}

type deviceInfo struct {
	Ordinal int `json:"ordinal"`
	*device.Properties
	FreeMemory uint64   `json:"free_memory"`
	Telemetry  *reading `json:"telemetry"`
}

type libraryInfo struct {
	Name    string `json:"name"`
	Version string `json:"version,omitempty"`
	Path    string `json:"path,omitempty"`
	Error   string `json:"error,omitempty"`
}

func inspect(sys *device.System, note string) (*report, error) {
	r := &report{Backend: sys.Backend(), Note: note, Defects: []defectInfo{}}
	for _, d := range sys.Devices() {
		p, err := d.Properties()
		if err != nil {
			return nil, err
		}
		free, _, err := d.MemoryInfo()
		if err != nil {
			return nil, err
		}
		told, err := read(d)
		if err != nil {
			return nil, err
		}
		r.Devices = append(r.Devices, deviceInfo{Ordinal: d.Ordinal(), Properties: p, FreeMemory: free, Telemetry: told})
		row, err := links(d, sys.Devices())
		if err != nil {
			return nil, err
		}
		r.Topology = append(r.Topology, row)
	}
	for _, l := range sys.Libraries() {
		i := libraryInfo{Name: l.Name, Version: l.Version, Path: l.Path}
		if l.Err != nil {
			i.Error = l.Err.Error()
		}
		r.Libraries = append(r.Libraries, i)
		if l.Name == "NCCL" && sys.Backend() == gpu.CUDA { // the NCCL of virtual devices has no defects of NVIDIA's
			r.Defects = defectsOf(l.Version)
		}
	}
	return r, nil
}

// defectsOf returns the known defects of a version of NCCL, and none if the version is not known.
func defectsOf(version string) []defectInfo {
	list := []defectInfo{}
	code, err := ncclapi.ParseVersion(version)
	if err != nil {
		return list
	}
	for _, d := range ncclapi.DefectsOf(code) {
		list = append(list, defectInfo{d.ID, d.Range(), d.Fault, d.When, d.Chorus, d.Open, d.Source})
	}
	return list
}

// links returns how d reaches each device: "self"; "peerN" for direct access,
// where N is the driver's rank of the link and 0 is the fastest; or "host".
func links(d *device.Device, devs []*device.Device) ([]string, error) {
	var row []string
	for _, o := range devs {
		if o == d {
			row = append(row, "self")
			continue
		}
		ok, err := d.CanAccessPeer(o)
		if err != nil {
			return nil, err
		}
		if !ok {
			row = append(row, "host")
			continue
		}
		rank, err := d.PeerRank(o)
		if err != nil {
			return nil, err
		}
		row = append(row, fmt.Sprintf("peer%d", rank))
	}
	return row, nil
}

func (r *report) print(out io.Writer) error {
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	if r.Note != "" {
		fmt.Fprintf(w, "%s\n\n", r.Note)
	}
	fmt.Fprintf(w, "DEVICE\tNAME\tCAPABILITY\tSMS\tMEMORY\tFREE\tPCI BUS\tUUID\n")
	for _, d := range r.Devices {
		fmt.Fprintf(w, "%s:%d\t%s\t%d.%d\t%d\t%s\t%s\t%s\t%s\n", r.Backend, d.Ordinal, d.Name, d.Major, d.Minor,
			d.Multiprocessors, gib(d.TotalMemory), gib(d.FreeMemory), d.PCIBusID, d.UUID)
	}
	r.printTelemetry(w)
	fmt.Fprintf(w, "\nLIBRARY\tVERSION\tLOADED FROM\n")
	for _, l := range r.Libraries {
		where := l.Path
		if l.Error != "" {
			where = l.Error
		}
		fmt.Fprintf(w, "%s\t%s\t%s\n", l.Name, l.Version, where)
	}
	if err := w.Flush(); err != nil {
		return err
	}
	r.printDefects(out)
	fmt.Fprintf(w, "\nLINKS")
	for j := range r.Topology {
		fmt.Fprintf(w, "\t%d", j)
	}
	fmt.Fprintln(w)
	for i, row := range r.Topology {
		fmt.Fprintf(w, "%d", i)
		for _, l := range row {
			fmt.Fprintf(w, "\t%s", l)
		}
		fmt.Fprintln(w)
	}
	fmt.Fprintf(w, "\npeerN: direct access, N = 0 is the fastest kind of link; host: copies pass through host memory\n")
	return w.Flush()
}

// printDefects prints the defects of the loaded NCCL, if there are any.
func (r *report) printDefects(out io.Writer) {
	if len(r.Defects) > 0 {
		fmt.Fprintf(out, "\nDEFECTS OF THE LOADED NCCL\n")
	}
	for _, d := range r.Defects {
		fmt.Fprintf(out, "%s (%s): %s when %s.\n  Chorus %s. Source: %s.\n", d.ID, d.Versions, d.Fault, d.When, d.Chorus, d.Source)
	}
}

// printTelemetry prints a line for each device with sensor readings, and once the
// reason for missing readings.
func (r *report) printTelemetry(w io.Writer) {
	fmt.Fprintf(w, "\nTELEMETRY\n")
	missing := ""
	for _, d := range r.Devices {
		if line := d.Telemetry.String(); line != "" {
			fmt.Fprintf(w, "%s:%d\t%s\n", r.Backend, d.Ordinal, line)
		}
		if missing == "" {
			missing = d.Telemetry.Missing
		}
	}
	if missing != "" {
		fmt.Fprintln(w, missing)
	}
}

func gib(bytes uint64) string { return fmt.Sprintf("%.1f GiB", float64(bytes)/(1<<30)) }

// A reading holds the sensor values of a device. Values without a sensor are
// omitted.
type reading struct {
	Utilization    *int             `json:"utilization_percent,omitempty"`
	MemoryActivity *int             `json:"memory_activity_percent,omitempty"`
	Temperature    *int             `json:"temperature_celsius,omitempty"`
	PowerDraw      *int             `json:"power_draw_milliwatts,omitempty"`
	ClockRate      *int             `json:"clock_rate_mhz,omitempty"`
	MemoryUsed     *uint64          `json:"memory_used_bytes,omitempty"`
	NVLinks        []bool           `json:"nvlinks_up,omitempty"`
	Processes      []device.Process `json:"processes,omitempty"`
	Missing        string           `json:"missing,omitempty"` // why a value is omitted
}

// read queries all sensors of a device, where a missing sensor is not an error.
func read(d *device.Device) (*reading, error) {
	r := new(reading)
	var wrong error
	note := func(err error) bool {
		switch {
		case err == nil:
		case !errors.Is(err, errors.ErrUnsupported):
			wrong = errors.Join(wrong, err)
		case r.Missing == "":
			r.Missing = err.Error()
		}
		return err == nil
	}
	for _, s := range []struct {
		to   **int
		from func() (int, error)
	}{
		{&r.Utilization, d.Utilization}, {&r.MemoryActivity, d.MemoryActivity}, {&r.Temperature, d.Temperature},
		{&r.PowerDraw, d.PowerDraw}, {&r.ClockRate, d.ClockRate},
	} {
		if v, err := s.from(); note(err) {
			*s.to = &v
		}
	}
	if v, err := d.MemoryUsed(); note(err) {
		r.MemoryUsed = &v
	}
	var err error
	r.NVLinks, err = d.NVLinks()
	note(err)
	r.Processes, err = d.Processes()
	note(err)
	return r, wrong
}

// String returns one line, or "" if no value is known.
func (r *reading) String() string {
	var parts []string
	add := func(format string, v *int) {
		if v != nil {
			parts = append(parts, fmt.Sprintf(format, *v))
		}
	}
	add("busy %d%%", r.Utilization)
	add("memory active %d%%", r.MemoryActivity)
	add("%d °C", r.Temperature)
	if r.PowerDraw != nil {
		parts = append(parts, fmt.Sprintf("%.0f W", float64(*r.PowerDraw)/1000))
	}
	add("%d MHz", r.ClockRate)
	if r.MemoryUsed != nil {
		parts = append(parts, mib(*r.MemoryUsed)+" used")
	}
	if len(r.NVLinks) > 0 {
		up := 0
		for _, u := range r.NVLinks {
			if u {
				up++
			}
		}
		parts = append(parts, fmt.Sprintf("%d of %d NVLinks up", up, len(r.NVLinks)))
	}
	if r.MemoryUsed != nil && r.Processes == nil {
		parts = append(parts, "no processes are running")
	}
	for _, p := range r.Processes {
		parts = append(parts, fmt.Sprintf("process %d uses %s", p.PID, mib(p.MemoryBytes)))
	}
	return strings.Join(parts, ", ")
}

func mib(bytes uint64) string { return fmt.Sprintf("%.0f MiB", float64(bytes)/(1<<20)) }

// released and commit are the version and the commit of a release. The release program sets them
// by -ldflags=-X, because the go command records neither in a checkout without tags.
var released, commit string

func newVersionCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "version",
		Short: "Show the version, the commit, and how the command was built",
		Args:  noArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			info, _ := debug.ReadBuildInfo()
			return printVersion(c.OutOrStdout(), info)
		},
	}
}

// version returns the module's version from the build information.
func version() string {
	info, _ := debug.ReadBuildInfo()
	return versionOf(info)
}

func versionOf(info *debug.BuildInfo) string {
	if released != "" {
		return released
	}
	if info == nil || info.Main.Version == "" {
		return "(devel)"
	}
	return info.Main.Version
}

// printVersion prints one line for each fact. It omits settings that are not
// known: go install of a released version records no commit.
func printVersion(w io.Writer, info *debug.BuildInfo) error {
	lines := []string{"chorus " + versionOf(info)}
	settings := map[string]string{}
	if info != nil {
		for _, s := range info.Settings {
			settings[s.Key] = s.Value
		}
	}
	switch hash := settings["vcs.revision"]; {
	case hash != "":
		if settings["vcs.modified"] == "true" {
			hash += ", with changes"
		}
		lines = append(lines, "commit     "+hash, "committed  "+settings["vcs.time"])
	case commit != "":
		lines = append(lines, "commit     "+commit)
	}
	lines = append(lines, "go         "+runtime.Version(), "platform   "+runtime.GOOS+"/"+runtime.GOARCH)
	for _, key := range []string{"CGO_ENABLED", "-tags", "-ldflags", "-trimpath", "-race"} {
		if v := settings[key]; v != "" {
			lines = append(lines, fmt.Sprintf("%-10s %s", strings.TrimPrefix(strings.ToLower(key), "-"), v))
		}
	}
	_, err := fmt.Fprintln(w, strings.Join(lines, "\n"))
	return err
}

// findDevices counts this host's devices without opening a driver, because the
// launcher must not hold a device and must start its workers at once. procs is
// the number of processes requested; 0 means one for each device.
func findDevices(procs int) (launch.Devices, error) {
	c, err := gpu.ChooseBackend()
	if _, wrong := errors.AsType[*env.ValueError](err); wrong {
		return launch.Devices{}, usage(err)
	}
	if err != nil {
		return launch.Devices{}, err
	}
	d := launch.Devices{Count: c.Devices, Backend: c.Backend}
	if c.Backend == gpu.CUDA {
		return d, nil
	}
	// Virtual devices cost nothing: create one for each process, unless the
	// environment sets their number.
	if procs > d.Count && !env.VirtualDevices.IsSet() {
		if procs > gpu.MaxVirtualDevices {
			return d, &launch.UsageError{Reason: fmt.Sprintf("--nproc-per-node %d: each process has a virtual device, and there are at most %d of them", procs, gpu.MaxVirtualDevices)}
		}
		d.Count = procs
		d.Env = append(d.Env, fmt.Sprintf("%s=%d", env.VirtualDevices.Name, procs))
	}
	if c.NoGPU != "" {
		d.Env = append(d.Env, env.Backend.Name+"="+gpu.Virtual)
		d.Note = c.Note(fmt.Sprintf("%d virtual devices", d.Count))
	}
	return d, nil
}
