package check

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	trainer "github.com/kubeflow/trainer/v2/pkg/apis/trainer/v1alpha1"
	"github.com/stretchr/testify/require"
	batch "k8s.io/api/batch/v1"
	core "k8s.io/api/core/v1"
	jobset "sigs.k8s.io/jobset/api/jobset/v1alpha2"
)

// A preflightPod is a manifest with the check: its pods, and the name of pod 0.
type preflightPod struct {
	spec  core.PodSpec
	nodes int32
	first string
}

func preflightPods(t *testing.T) map[string]preflightPod {
	t.Helper()
	job := decode[batch.Job](t, "job-preflight.yaml", 1)
	set := decode[jobset.JobSet](t, "jobset-preflight.yaml", 0)
	runtime := decode[trainer.TrainingRuntime](t, "trainjob-preflight.yaml", 0)
	train := decode[trainer.TrainJob](t, "trainjob-preflight.yaml", 1)
	hosts, node := set.Spec.ReplicatedJobs[0], runtime.Spec.Template.Spec.ReplicatedJobs[0]
	require.Equal(t, runtime.Name, train.Spec.RuntimeRef.Name)
	require.Equal(t, runtime.Kind, *train.Spec.RuntimeRef.Kind)
	require.Equal(t, *runtime.Spec.MLPolicy.NumNodes, *train.Spec.Trainer.NumNodes)
	for _, rules := range [][]batch.PodFailurePolicyRule{job.Spec.PodFailurePolicy.Rules, hosts.Template.Spec.PodFailurePolicy.Rules} {
		require.Len(t, rules, 2)
		require.Equal(t, "preflight", *rules[1].OnExitCodes.ContainerName)
		require.Equal(t, []int32{2}, rules[1].OnExitCodes.Values, "a mistake in a setting")
	}
	return map[string]preflightPod{
		"job":      {job.Spec.Template.Spec, *job.Spec.Completions, job.Name + "-0." + job.Spec.Template.Spec.Subdomain},
		"jobset":   {hosts.Template.Spec.Template.Spec, *hosts.Template.Spec.Completions, set.Name + "-" + hosts.Name + "-0-0." + set.Name},
		"trainjob": {node.Template.Spec.Template.Spec, *train.Spec.Trainer.NumNodes, train.Name + "-" + node.Name + "-0-0." + train.Name},
	}
}

// The check runs before the program, with the rights of the program, on all hosts and GPUs of the job.
func TestPreflightManifests(t *testing.T) {
	for name, x := range preflightPods(t) {
		t.Run(name, func(t *testing.T) {
			require.Len(t, x.spec.InitContainers, 1)
			check, program := x.spec.InitContainers[0], x.spec.Containers[0]
			require.Equal(t, "preflight", check.Name)
			require.Equal(t, x.first, after(t, check.Args, "--seeds"))
			require.Equal(t, itoa(x.nodes), after(t, check.Args, "--nnodes"))
			require.Equal(t, "$(JOB_COMPLETION_INDEX)", after(t, check.Args, "--node-rank"))
			require.Equal(t, core.TerminationMessagePathDefault, after(t, check.Args, "--output"))
			require.Equal(t, program.VolumeMounts, check.VolumeMounts)
			require.Equal(t, program.SecurityContext, check.SecurityContext)
			gpus := check.Resources.Limits["nvidia.com/gpu"]
			if limit, ok := program.Resources.Limits["nvidia.com/gpu"]; ok { // a TrainJob has it elsewhere
				require.Equal(t, limit, gpus)
			}
			require.EqualValues(t, 8, gpus.Value())
			checkRights(t, x.spec.SecurityContext)
			require.Equal(t, core.RestartPolicyNever, x.spec.RestartPolicy)
		})
	}
}

// The arguments of the init containers run on two hosts of virtual devices, and all hosts have one verdict.
func TestPreflightRuns(t *testing.T) {
	for name, x := range preflightPods(t) {
		t.Run(name, func(t *testing.T) {
			b, port := newBench(t), freePort(t)
			verdict := filepath.Join(b.dir, "verdict")
			b.hosts(t, 2, func(ctx context.Context, host int) *exec.Cmd {
				mine := slices.Clone(x.spec.InitContainers[0].Args)
				for i := range mine {
					mine[i] = strings.NewReplacer("$(JOB_COMPLETION_INDEX)", itoa(host), x.first, "127.0.0.1:"+itoa(port),
						"/secret/key", b.secret, "/app/chorus", filepath.Join(b.dir, "chorus"), "/dev/termination-log", verdict).Replace(mine[i])
				}
				return b.command(ctx, []string{"CHORUS_HOST=train-" + itoa(host), "JOB_COMPLETION_INDEX=" + itoa(host)}, "chorus", append(mine, "--no-health", "--maxbytes", "4K")...)
			})
			text, err := os.ReadFile(verdict)
			require.NoError(t, err)
			require.Equal(t, 4, strings.Count(string(text), "pass  GPU-"), "%s", text)
			require.Contains(t, string(text), "of host train-1")
			require.Contains(t, string(text), "\npass after ")
		})
	}
}

// The image has the command and NCCL, and nothing else of CUDA.
func TestPreflightImage(t *testing.T) {
	text, err := os.ReadFile("../docker/preflight.Dockerfile")
	require.NoError(t, err)
	require.Regexp(t, `(?m)^USER [1-9]`, string(text))
	require.Contains(t, string(text), "sha256sum -c")
	steps := regexp.MustCompile(`(?m)^#.*$`).ReplaceAllString(string(text), "")
	require.NotRegexp(t, regexp.MustCompile(`(?i)nvrtc|cublas|cudart|python`), steps)
	require.Contains(t, steps, `CMD ["preflight"]`)
	main, err := os.ReadFile("../docker/Dockerfile")
	require.NoError(t, err)
	for _, line := range []string{"ARG GO=", "ARG DEBIAN=", "ARG BASE=", "ADD https"} {
		find := regexp.MustCompile(`(?m)^` + line + `.*$`)
		require.NotEmpty(t, find.FindString(steps))
		require.Equal(t, find.FindString(string(main)), find.FindString(steps), "both images have one base")
	}
}
