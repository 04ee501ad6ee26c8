// Answers questions of IAM by an evaluator that is not ours: `node judge.mjs` reads {policy, action, resource, context, key}, JSON in a
// line each, and prints {result, errors} for it. `key` is the policy of a KMS key. Asks nobody; AWS's actions and resources are in its package.
import { createInterface } from 'node:readline'
import { runSimulation } from '@cloud-copilot/iam-simulate'

const account = '123456789012'
for await (const line of createInterface({ input: process.stdin })) {
  const asked = JSON.parse(line)
  const said = await runSimulation(
    {
      request: {
        principal: `arn:aws:sts::${account}:assumed-role/Role/session`,
        action: asked.action,
        resource: { resource: asked.resource, accountId: account },
        contextVariables: asked.context ?? {},
      },
      identityPolicies: [{ name: 'run', policy: asked.policy }],
      serviceControlPolicies: [],
      resourceControlPolicies: [],
      ...(asked.key ? { resourcePolicy: asked.key } : {}),
    },
    {},
  )
  const answer = (said.resultType === 'error' ? { result: 'error', errors: said.errors } : { result: said.overallResult, errors: null })
  console.log(JSON.stringify(answer))
}
